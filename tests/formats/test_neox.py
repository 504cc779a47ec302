"""GPT-NeoX under a real DeepSpeed engine: its scheduler has the keys of Megatron's and other rules,
so what a plan promises, and where a cooldown ends, is held against the scheduler itself."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.schedules import neox
from ckptsurgeon.logs.printed import megatron
from ckptsurgeon.recipe.file import from_data
from tests.support.engines import end_engines
from tests.support.in_process import one_rank
from tests.support.neox_trainer import END, FLOOR, START, WARMUP, train
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

BY_ITSELF = {
    "linear": {0: 0.0005, 1: 0.0005, 2: 0.001, 3: 0.0009444444444444445,
               8: 0.0006666666666666666, 11: 0.0005, 20: 0.0001, 23: 0.0001},
    "cosine": {0: 0.0005, 2: 0.001, 3: 0.0009931634888554937, 8: 0.0007750000000000001,
               11: 0.00055, 20: 0.0001, 23: 0.00016028856829700263},
    "exponential": {1: 0.0005, 3: 0.0009622317047398176, 8: 0.0007937394660352429,
                    20: 0.0005000735956957677, 23: 0.00044552585403792653},
    "constant": {0: 0.0005, 2: 0.001, 3: 0.001, 23: 0.001},
}  # fmt: skip
"""Style → iteration → the rate that the class of gpt-neox at ea7aefd8 itself set."""
LINE = (
    " samples/sec: 42.100 | iteration        8/      20 | elapsed time per iteration (ms): 12.3 |"
    " learning rate: 7.750E-04 | approx flops per GPU: 1.0GFLOPS | lm_loss: 1.234000E+00 |"
    " loss scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield
    end_engines()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A run of eight updates of each style."""
    root = tmp_path_factory.mktemp("neox")
    for style in BY_ITSELF:
        train(root / style, 8, style)
    yield {style: root / style for style in BY_ITSELF}


def operate(root: Path, recipe: dict[str, Any]) -> Plan:
    """Apply, and find nothing left to do."""
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    assert look.verify(Run.open(root), level=4).findings == ()
    return made


@pytest.mark.parametrize("style", BY_ITSELF)
def test_the_rates_are_those_of_its_own_class(style: str) -> None:
    for now, rate in BY_ITSELF[style].items():
        state = {
            "start_lr": START, "min_lr": FLOOR, "warmup_iter": WARMUP, "end_iter": END,
            "decay_style": style, "num_iters": now,
        }  # fmt: skip
        assert neox.learning_rate(state) == pytest.approx(rate, rel=1e-15), now


EDITS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from([2e-4, 3e-3]),
        "min_lr": st.sampled_from([0.0, 2e-5, 1.5e-4]),
        "warmup": st.integers(0, 12),
        "decay": st.integers(14, 40),
        "decay_style": st.sampled_from(["linear", "cosine", "constant"]),
        "position": st.integers(0, 12),
    },
).filter(bool)


@pytest.mark.long
@given(style=st.sampled_from(sorted(BY_ITSELF)), edit=EDITS, to=st.sampled_from([4, 8]))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_next_update_uses_what_is_promised(
    runs: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    style: str,
    edit: dict[str, Any],
    to: int,
) -> None:
    """And those after it go on along the edited schedule."""
    root = tmp_path_factory.mktemp("edited") / "run"
    shutil.copytree(runs[style], root)
    before = snapshot(root)
    operate(root, {"rollback": {"to": to}, "set": edit})
    take_back(root, before)
    made = operate(root, {"rollback": {"to": to}, "set": edit})
    assert made.promise is not None and made.promise.lr is not None
    rates = [one for one, _ in train(root, to + 3, style, every=100)]
    assert rates[0] == pytest.approx(made.promise.lr, rel=1e-12)
    state = Run.open(root).checkpoint(to).schedule()
    later = [neox.learning_rate({**state, "num_iters": state["num_iters"] + i}) for i in range(3)]
    assert rates == pytest.approx(later, rel=1e-9)
    shutil.rmtree(root)


@pytest.mark.parametrize(("style", "shape", "last"), [
    ("linear", "linear", 0.0), ("cosine", "linear", 2e-4), ("exponential", "cosine", 2e-4),
])  # fmt: skip
def test_a_cooldown_counts_iterations_and_ends_where_it_was_told(
    runs: dict[str, Path], tmp_path: Path, style: str, shape: str, last: float
) -> None:
    root = tmp_path / "run"
    shutil.copytree(runs[style], root)
    (before, _), *_ = train(tmp_path / "run", 9, style, every=100)
    made = operate(root, {"cooldown": {"steps": 4, "to": last, "shape": shape}})
    rates = [one for one, _ in train(root, 13, style, every=100)]
    assert made.promise is not None and made.promise.lr == pytest.approx(before)
    assert rates[0] == pytest.approx(before) and rates[4] == pytest.approx(last, abs=1e-12)
    assert rates == sorted(rates, reverse=True)
    if shape == "linear":
        assert rates[2] == pytest.approx((before + last) / 2)
    else:
        assert any("rises again" in note for note in made.warnings)


def test_without_zero_the_schedule_alone_decides(tmp_path: Path) -> None:
    train(tmp_path, 8, "linear", stage=0)
    made = operate(tmp_path, {"set": {"lr": 3e-4}})
    assert made.promise is not None
    assert train(tmp_path, 9, "linear", stage=0, every=100)[0][0] == made.promise.lr
    assert made.promise.lr == pytest.approx(2e-4)


def test_a_group_of_mup_keeps_its_share(tmp_path: Path) -> None:
    train(tmp_path, 8, "linear", width=4.0)
    operate(tmp_path, {"set": {"lr": 3e-4}})
    assert train(tmp_path, 9, "linear", width=4.0, every=100)[0] == pytest.approx([5e-5, 2e-4])


def test_the_plan_says_which_key_of_the_config_lets_the_file_count(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(runs["cosine"], root)
    made = operate(root, {"set": {"lr": 3e-4}})
    assert any('"use_checkpoint_lr_scheduler": true' in note for note in made.warnings)
    with pytest.raises(AssertionError, match="start_lr"):
        train(root, 9, "cosine", use_checkpoint=False, every=100)


def test_the_same_keys_with_other_rates_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    """Megatron's loader of today reads them, too, and makes another rate of a linear decay."""
    root = tmp_path / "run"
    shutil.copytree(runs["linear"], root)
    for path in root.glob("global_step8/mp_rank_*"):
        held = torch.load(path, weights_only=False)
        torch.save({**held, "args": Namespace(**held["args"])}, path)
    with pytest.raises(SurgeryError, match="is not known"):
        plan(Run.open(root), from_data({"set": {"lr": 3e-4}}))
    assert plan(Run.open(root), from_data({"rollback": {"to": 4}})).changes


def test_a_printed_line_is_read(runs: dict[str, Path]) -> None:
    said = megatron.read(LINE)
    assert said is not None and said.step == 8
    assert said.loss is not None and said.loss.value == 1.234
    rate = look.inspect(Run.open(runs["cosine"])).promise.lr
    assert said.next_lr is not None and said.next_lr.value == pytest.approx(rate, rel=1e-3)
