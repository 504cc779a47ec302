"""A schedule that starts again: the real scheduler objects give the rates of the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import Hyperparameters, Run, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data, to_data
from tests.support import megatron_engine
from tests.support.cooled import (
    CLASSES,
    D,
    accelerated,
    as_told,
    closed,
    copied,
    loaded,
    same,
    stepped,
)
from tests.support.deepspeed_engine import make
from tests.support.deepspeed_schedulers import options
from tests.support.fairseq_files import make_run as fairseq
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def rewarmed(peak: float, floor: float, warmup: int, decay: int, shape: str) -> list[float]:
    """Linear from 0, then the shape: the rates of every update of the new schedule and one more."""
    up = [peak * k / warmup for k in range(warmup)]
    return [*up, *(rate for rate in closed(peak, floor, shape, decay))]


@pytest.mark.witness("Megatron-DeepSpeed", "set-lr --restart", by="deepspeed")
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_annealing_lr_starts_again(annealed: Path, tmp_path: Path, shape: str) -> None:
    """From any position: the second pre-training of 2308.04014."""
    root = copied(annealed, tmp_path)
    before = snapshot(root)
    wanted = {"to": 3e-4, "warmup": 4, "decay": 8, "min_lr": 3e-5, "shape": shape}
    made = plan(Run.open(root), from_data({"rewarm_schedule": wanted}))
    surgery.apply(Run.open(root), made)
    assert plan(Run.open(root), from_data(dict(made.recipe))).empty
    with megatron_engine.megatron():
        held = megatron_engine.resume(root, 13, use_checkpoint_lr_scheduler=True)
    found, expected = held["rates"], rewarmed(3e-4, 3e-5, 4, 8, shape)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-12 * 3e-4
    assert made.promise is not None and made.promise.lr == 0.0 == found[0]
    take_back(root, before)


def test_a_cosine_of_torch_starts_again(tmp_path: Path) -> None:
    root = accelerated(tmp_path, "CosineAnnealingLR")
    wanted = {"to": 2e-3, "warmup": 0, "decay": D, "min_lr": 1e-6}
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rewarm_schedule": wanted})))
    same(stepped(*loaded(root, CLASSES["CosineAnnealingLR"]))[0], closed(2e-3, 1e-6, "cosine"))
    with pytest.raises(SurgeryError, match="keeps no warmup"):
        plan(Run.open(root), from_data({"rewarm_schedule": {**wanted, "warmup": 2}}))


@pytest.mark.parametrize("shape", [None, "constant", "linear"])
@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "StepLR"])
def test_the_scheduler_that_a_refusal_names_starts_again(
    tmp_path: Path, name: str, shape: str | None
) -> None:
    """A class whose state keeps no warm-up. The first update after a load takes the rate that the
    groups have: a LambdaLR that loads its state sets them from the second one on."""
    root = accelerated(tmp_path, name)
    before = snapshot(root)
    wanted = {"to": 3e-4, "warmup": 4, "decay": 8, "min_lr": 3e-5}
    wanted |= {} if shape is None else {"shape": shape}
    with pytest.raises(SurgeryError, match=r"keeps no .*warmup in its state") as error:
        plan(Run.open(root), from_data({"rewarm_schedule": wanted}))
    assert snapshot(root) == before
    found = stepped(*as_told(root, error.value.next[0]), 12)[0]
    expected = rewarmed(3e-4, 3e-5, 4, 8, shape or "cosine")
    same(found[4:], expected[4:])
    assert found[1:4] == pytest.approx(expected[1:4], rel=1e-12)


def test_deepspeed_is_told_the_config_of_a_new_start(tmp_path: Path, alone: None) -> None:
    make(tmp_path, options("WarmupDecayLR"), 6)
    wanted = {"to": 2e-3, "warmup": 3, "decay": 7}
    made = plan(Run.open(tmp_path), from_data({"rewarm_schedule": wanted}))
    (warning,) = made.warnings
    assert '"warmup_max_lr": 0.002, "total_num_steps": 10, "warmup_num_steps": 3' in warning


def test_without_a_position_nothing_starts_again(tmp_path: Path) -> None:
    fairseq(tmp_path / "run")
    with pytest.raises(SurgeryError, match="no scheduler position, so the schedule"):
        plan(
            Run.open(tmp_path / "run"),
            from_data({"rewarm_schedule": {"to": 1e-4, "warmup": 1, "decay": 2}}),
        )


def test_set_lr_restart_is_this_section() -> None:
    from ckptsurgeon.operations.set_commands import set_lr

    recipe = set_lr(Hyperparameters(lr=3e-4, warmup=500, decay=20000), restart=True)
    assert to_data(recipe) == {"rewarm_schedule": {"to": 3e-4, "warmup": 500, "decay": 20000}}
    with pytest.raises(UsageError, match="needs its peak, warm-up and decay"):
        set_lr(Hyperparameters(lr=3e-4), restart=True)
