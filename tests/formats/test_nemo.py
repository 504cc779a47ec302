"""NeMo 2 by its sources: the real megatron-core trains, saves `weights/`, and loads it edited, in
layouts that `test_nemo_real.py`, whose trainer is NeMo's, does not have.

What is loaded, and in which order, is in `tests/support/nemo.py`."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import REPO
from tests.support.newest_megatron import by
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = pytest.mark.formats
pytest.importorskip("megatron.core")
LIBRARIES = ["installed", "newest"]
EDITS: dict[str, Any] = {
    "rollback": {"to": 4},
    "set": {
        "lr": 5e-4,
        "min_lr": 5e-5,
        "beta1": 0.8,
        "beta2": 0.99,
        "eps": 1e-7,
        "weight_decay": 0.05,
    },
    "reset": ["moments"],
}


def nemo(what: str, root: Path, *flags: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.nemo", what, str(root)]
    done = subprocess.run(
        [*command, *flags], cwd=REPO, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def loaded(root: Path, *flags: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(nemo("load", root, *flags))
    return told


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, ...], Path] = {}

    def make(*flags: str) -> Path:
        if flags not in made:
            made[flags] = tmp_path_factory.mktemp("saved") / "checkpoints"
            nemo("save", made[flags], *flags)
        return made[flags]

    return make


@pytest.fixture
def copied(tmp_path: Path, saved: Callable[..., Path]) -> Callable[..., Path]:
    return lambda *flags: Path(shutil.copytree(saved(*flags), tmp_path / "log" / "checkpoints"))


@pytest.fixture
def root(copied: Callable[..., Path]) -> Path:
    return copied()


def cosine(step: int, peak: float, floor: float, warmup: int = 2, end: int = 40) -> float:
    share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))
    return (peak - floor) * share + floor


@pytest.mark.thinned(2)
@pytest.mark.witness(
    "NeMo 2", "set betas", "set eps", "set weight_decay", "reset moments", by="megatron-core"
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_set_is_what_the_next_updates_use(
    copied: Callable[..., Path], library: str
) -> None:
    """The newest keeps what is not sharded among the values."""
    flags = by(library)
    root = copied(*flags)
    assert any(root.glob("*/weights/common.pt")) is (library == "installed")
    before = snapshot(root)
    run = Run.open(root)
    assert (run.format.name, run.steps(), run.latest()) == ("nemo", [2, 4, 6], 6)
    assert look.verify(run, level=4).findings == ()
    plan = operate(root, EDITS)
    assert plan.promise is not None and plan.promise.consumed_samples == 32
    told = loaded(root, *flags)
    assert told["step"] == 4 and told["consumed_samples"] == {"consumed_samples": 32}
    assert told["betas"] == [[0.8, 0.99]] * 2 and told["eps"] == [1e-7] * 2
    assert told["weight_decay"] == [0.05, 0.0] and told["adam_step"] == [0, 0]
    assert told["exp_avg"] == 0 and told["exp_avg_sq"] == 0
    assert told["lr"] == [plan.promise.lr] * 2
    wanted = [cosine(step, 5e-4, 5e-5) for step in (4, 5, 6)]
    assert told["used"] == pytest.approx(wanted, rel=1e-12)
    take_back(root, before)
    assert loaded(root, *flags)["used"][0] == pytest.approx(cosine(6, 1e-3, 1e-4))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "sharding, constant", [("dp_reshardable", "0"), ("fully_reshardable", "8")]
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_other_layouts_and_the_schedule_that_holds_its_floor(
    copied: Callable[..., Path], library: str, sharding: str, constant: str
) -> None:
    """Of dp_reshardable, NeMo's default from 2.5 on, the param groups are values of their own."""
    flags = ("--sharding", sharding, "--constant", constant, *by(library))
    root = copied(*flags)
    before = snapshot(root)
    rates = loaded(root, *flags)["used"]
    operate(root, {"set": {"lr": 5e-4, "min_lr": 5e-5, "beta1": 0.8}, "reset": ["moments"]})
    told = loaded(root, *flags)
    assert told["used"] == pytest.approx([rate / 2 for rate in rates], rel=1e-9)
    assert told["betas"] == [[0.8, 0.95]] * 2 and told["exp_avg"] == 0
    take_back(root, before)


def test_moments_that_are_gathered_in_one_value_are_refused(
    copied: Callable[..., Path],
) -> None:
    """`ckpt_parallel_save_optim=False`: a reset would begin Adam's step anew and nothing else."""
    flags = ("--sharding", "dp_zero_gather_scatter")
    root = copied(*flags)
    before = snapshot(root)
    for recipe in ({"reset": ["moments"]}, {"average": {"last": 2, "moments": "average"}},
                   {"reset": ["moments"], "moments": {"only": "exp_avg"}}):  # fmt: skip
        with pytest.raises(SurgeryError):
            surgery.plan(Run.open(root), from_data(recipe))
    assert snapshot(root) == before
    operate(root, {"set": {"lr": 5e-4, "beta1": 0.8}})
    told = loaded(root, *flags)
    assert told["betas"] == [[0.8, 0.95]] * 2 and told["adam_step"] == [6, 6]
    assert told["used"][0] == pytest.approx(cosine(6, 5e-4, 1e-4))


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_schedule_is_moved_and_cooled_down(copied: Callable[..., Path], library: str) -> None:
    flags = by(library)
    root = copied(*flags)
    before = snapshot(root)
    operate(root, {"set": {"warmup": 3, "decay": 20}})
    now = [cosine(step, 1e-3, 1e-4, 3, 20) for step in (6, 7, 8)]
    assert loaded(root, *flags)["used"] == pytest.approx(now, rel=1e-12)
    take_back(root, before)
    rate = loaded(root, *flags)["used"][0]
    operate(root, {"cooldown": {"steps": 5, "shape": "cosine", "to": 0.0}})
    used = loaded(root, *flags)["used"]
    assert used == pytest.approx([cosine(n, rate, 0, 0, 5) for n in (0, 1, 2)])
    take_back(root, before)
    with pytest.raises(SurgeryError, match="CosineAnnealing can't decay linear") as refused:
        surgery.plan(Run.open(root), from_data({"cooldown": {"steps": 5, "shape": "linear"}}))
    assert "LambdaLR" in refused.value.next[0]


def test_what_the_trainer_marks_as_unfinished_is_not_resumed(root: Path) -> None:
    """Its ModelCheckpoint removes what is marked, and AutoResume refuses a marked `*-last`."""
    (last,) = root.glob("*-last")
    (marked,) = (path for path in root.glob("*step=6*") if path != last)
    (other,) = root.glob("*step=2*")
    markers = [path.with_name(f"{path.name}-unfinished") for path in (last, marked, other)]
    for path in markers:
        path.touch()
    before = snapshot(root)
    run = Run.open(root)
    assert run.complete(4) and not run.complete(2) and not run.complete(6)
    with pytest.raises(SurgeryError, match="unfinished"):
        surgery.plan(run, from_data({"rollback": {"to": 2}}))
    operate(root, {"rollback": {"to": 4}})
    assert [path for path in markers if path.exists()] == [markers[2]]
    assert loaded(root)["step"] == 4
    take_back(root, before)


def test_a_step_without_its_optimizer_and_one_that_is_not_whole(root: Path) -> None:
    """At the end of a training NeMo saves the weights alone (save_optim_on_train_end)."""
    import torch

    (step,) = root.glob("*step=4*")
    common = step / "weights" / "common.pt"
    state = torch.load(common, weights_only=False)
    bare = {key: value for key, value in state.items() if key not in ("optimizer", "lr_schedulers")}
    torch.save(bare, common)
    for recipe in ({"rollback": {"to": 4}}, {"rollback": {"to": 4}, "set": {"lr": 1e-4}}):
        with pytest.raises(SurgeryError, match="keeps no optimizer"):
            surgery.plan(Run.open(root), from_data(recipe))
    (step / "weights" / "metadata.json").unlink()
    assert not Run.open(root).complete(4)


def test_a_scheduler_that_could_be_one_of_five_is_refused(root: Path) -> None:
    import torch

    for path in root.glob("*step=6*"):
        common = path / "weights" / "common.pt"
        state = torch.load(common, weights_only=False)
        for key in ("constant_steps", "decay_steps"):
            del state["lr_schedulers"][0][key]
        torch.save(state, common)
    before = snapshot(root)
    with pytest.raises(SurgeryError, match="WarmupPolicy, WarmupAnnealing and three more"):
        surgery.plan(Run.open(root), from_data({"set": {"lr": 1e-4}}))
    assert snapshot(root) == before
    operate(root, {"set": {"beta2": 0.9, "weight_decay": 0.2}})
