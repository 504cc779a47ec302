"""NeMo 2: its own trainer saves, and AutoResume goes on from what was edited."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.launch import run_module, said_by_step
from tests.support.newest_megatron import beside
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.skipif(
        not (beside("nemo").is_dir() and (beside("sources") / "nemo").is_dir()),
        reason="make test-formats installs it",
    ),
]
VALUES = {
    "lr": 5e-4, "min_lr": 5e-5, "beta1": 0.8, "beta2": 0.99, "eps": 1e-7, "weight_decay": 0.05,
}  # fmt: skip
PEAK, FLOOR, WARMUP, END, BATCH = 1e-3, 1e-4, 2, 40, 8
"""Of `tests.support.nemo_loop`."""


def train(root: Path, stop: int, *settings: str) -> dict[int, Any]:
    """To step `stop`, from where AutoResume begins: what each update used."""
    done = run_module(
        "tests.support.nemo_trainer", root, stop, *settings,
        environment={"PYTHONWARNINGS": "ignore"}, warm="tests.support.nemo_loop",
    )  # fmt: skip
    return said_by_step(done.stdout)


def checkpoints(root: Path) -> Path:
    return root / "run" / "checkpoints"


def cosine(step: int, peak: float = PEAK, floor: float = FLOOR) -> float:
    """CosineAnnealing's rate of update `step + 1`."""
    share = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (END - WARMUP)))
    return (peak - floor) * share + floor


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was cut off at step 4 and went on to step 6."""
    root = tmp_path_factory.mktemp("nemo")
    used = train(root, 4)
    used |= train(root, 6)
    (root / "used.json").write_text(json.dumps(used))
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "log", symlinks=True))


def told(root: Path) -> dict[int, Any]:
    return {int(step): used for step, used in json.loads((root / "used.json").read_text()).items()}


@pytest.mark.witness(
    "NeMo 2",
    "rollback", "set-lr", "set betas", "set eps", "set weight_decay", "reset moments",
    by="nemo_toolkit",
)  # fmt: skip
def test_the_promise_is_what_its_updates_use(root: Path, tmp_path: Path) -> None:
    run = checkpoints(root)
    before = snapshot(run)
    opened = Run.open(run)
    assert (opened.format.name, opened.steps(), opened.latest()) == ("nemo", [2, 4, 6], 6)
    for level in range(5):
        assert look.verify(opened, level=level).findings == ()
    plan = operate(run, {"rollback": {"to": 4}, "set": VALUES, "reset": ["moments"]})
    promise = plan.promise
    assert promise is not None and promise.step == 5 and promise.asked
    twin = Path(shutil.copytree(root, tmp_path / "twin", symlinks=True))
    used = train(twin, 6, "lr=0.0007", "min_lr=0.0003")  # which the checkpoint wins over
    assert sorted(used) == [5, 6]
    assert used[5]["lr"] == [promise.lr] * 2
    assert used[5]["lr"][0] == pytest.approx(cosine(4, 5e-4, 5e-5), rel=1e-12)
    assert used[6]["lr"][0] == pytest.approx(cosine(5, 5e-4, 5e-5), rel=1e-12)
    for update in used.values():
        assert update["betas"] == [[0.8, 0.99]] * 2 and update["eps"] == [1e-7] * 2
        assert tuple(update["weight_decay"]) == promise.weight_decay == (0.05, 0.0)
    assert used[5]["adam_step"] == [promise.adam_step] * 2 == [0, 0]
    assert used[5]["exp_avg"] == used[5]["exp_avg_sq"] == 0
    assert sorted(used[5]["numbers"]) == list(range(32, 32 + BATCH))
    assert promise.consumed_samples == 32
    take_back(run, before)


def test_a_rollback_alone_is_followed_by_the_same_updates(root: Path) -> None:
    """Rates, moments, masters and data; and its own saver keeps the steps that stay."""
    operate(checkpoints(root), {"rollback": {"to": 4}})
    used = train(root, 6)
    assert used == {step: told(root)[step] for step in (5, 6)}
    assert Run.open(checkpoints(root)).steps() == [2, 4, 6]


@pytest.mark.witness("NeMo 2", "set consumed_samples", "cooldown --shape cosine", by="nemo_toolkit")
def test_the_data_and_the_schedule_go_on_as_they_are_set(root: Path, tmp_path: Path) -> None:
    run = checkpoints(root)
    before = snapshot(run)
    operate(run, {"set": {"consumed_samples": 80}})
    used = train(Path(shutil.copytree(root, tmp_path / "data", symlinks=True)), 7)
    assert sorted(used[7]["numbers"]) == list(range(80, 80 + BATCH))
    take_back(run, before)
    operate(run, {"cooldown": {"steps": 3, "shape": "cosine", "to": 0.0}})
    used = train(root, 9)
    rates = [used[step]["lr"][0] for step in (7, 8, 9)]
    wanted = [cosine(6) * (1 + math.cos(math.pi * n / 3)) / 2 for n in range(3)]
    assert rates == pytest.approx(wanted, rel=1e-9)


def test_hints_are_keys_of_its_recipe(root: Path) -> None:
    """`OptimizerConfig(clip_grad=…)` and `data.global_batch_size`."""
    hints = []
    for key, value in (("clip_grad", 0.25), ("batch_size", 16), ("seed", 4321)):
        with pytest.raises(SurgeryError) as refused:
            surgery.plan(Run.open(checkpoints(root)), from_data({"set": {key: value}}))
        hints.append(str(refused.value.next[0]))
    assert "OptimizerConfig(clip_grad=0.25)" in hints[0]
    assert "data.global_batch_size=16" in hints[1]
    used = train(root, 7, "batch=16")
    assert sorted(used[7]["numbers"]) == list(range(48, 64))
