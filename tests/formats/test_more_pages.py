"""Runs of Coqui's trainer, nerfstudio, rsl_rl, DETR and sd-scripts, and what resumes use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support import more_described_runs as runs
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

MADE = {
    "coqui": (runs.coqui, runs.coqui_resumed),
    "nerfstudio": (runs.nerfstudio, runs.nerfstudio_resumed),
    "two optimizers": (partial(runs.nerfstudio, optimizers=2), runs.nerfstudio_resumed),
    "detr": (runs.detr, runs.detr_resumed),
    "sd-scripts": (runs.sd_scripts, runs.sd_scripts_resumed),
    "rsl-rl-fixed": (runs.rsl_rl, runs.rsl_rl_resumed),
}
NAMED = ("rsl-rl-fixed",)
"""Pages that no folder tells: they are named."""


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("back", [0, 1])
def test_a_resume_uses_what_was_promised(tmp_path: Path, name: str, back: int) -> None:
    make, resumed = MADE[name]
    root = make(tmp_path / "run")
    if name in NAMED:
        (root / "ckptsurgeon.yaml").write_text(f"format: {name}\n")
    before, run = snapshot(root), Run.open(root)
    step = run.steps()[-1 - back]
    settings = {"beta2": 0.9, "weight_decay": 0.3}
    if name != "two optimizers":
        settings["lr"] = 5e-4
    wanted = {"rollback": {"to": step}, "set": settings, "reset": ["moments"]}
    made = plan(run, from_data(wanted))
    surgery.apply(run, made)
    saved, loop = resumed(root)
    assert saved == step
    first, *others = loop.next()
    assert made.promise is not None and first["lr"] == pytest.approx(made.promise.lr)
    for used in (first, *others):
        assert used["betas"] == (0.9, 0.9) and used["weight_decay"] == 0.3
        assert used["step"] == {0.0}
    take_back(root, before)


def test_the_adaptive_rate_of_rsl_rl_is_refused(tmp_path: Path) -> None:
    run = Run.open(runs.rsl_rl(tmp_path / "run"))
    assert run.format.name == "rsl-rl"
    with pytest.raises(SurgeryError, match="does not decide lr") as refused:
        plan(run, from_data({"set": {"lr": 1e-4}}))
    assert "--format rsl-rl-fixed" in refused.value.next[0]
    made = plan(run, from_data({"set": {"beta2": 0.9}}))
    assert made.promise is not None and "lr" in made.promise.not_known


def test_seconds_are_no_steps(tmp_path: Path) -> None:
    """`Logger.log` of rsl-rl-lib 5.5.1 logs rewards over the seconds of the launch, too."""
    root = runs.rsl_rl(tmp_path / "run")
    log: Any = SummaryWriter(str(root))  # type: ignore[no-untyped-call]
    for iteration in range(7):
        log.add_scalar("Loss/value", 1.0, iteration)
        log.add_scalar("Train/mean_reward", 1.0, iteration)
        log.add_scalar("Train/mean_reward/time", 1.0, 100 * iteration)
    log.close()
    run = Run.open(root)
    (stream,) = [stream for source in run.log_sources() for stream in source.streams()]
    assert stream.last == 6
    surgery.apply(run, plan(run, from_data({"rollback": {"to": 4}})))
    left: Any = EventAccumulator(str(root))  # type: ignore[no-untyped-call]
    left.Reload()
    assert [point.step for point in left.Scalars("Loss/value")] == [0, 1, 2, 3, 4]
    seconds = [point.step for point in left.Scalars("Train/mean_reward/time")]
    assert seconds == [0, 100, 200, 300, 400]
