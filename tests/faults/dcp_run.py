"""A surgery on a checkpoint of torch.distributed: a new file, `.metadata`, sums and `common.pt`."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.recipe.file import from_data
from tests.faults.world import Scenario

RECIPE = {"set": {"beta1": 0.5}, "reset": ["moments"]}
OLD, NEW = (0.9, 0.95), (0.5, 0.95)


def surgeries(original: Path) -> tuple[Scenario, Scenario]:
    """Apply and undo on copies of `original`, a run of Megatron-LM."""
    recover = partial(_in_run, surgery.recover)
    return (
        Scenario("apply", partial(_build, original), partial(_in_run, _apply), recover, read),
        Scenario("undo", partial(_operated, original), partial(_in_run, _undo), recover, read),
    )


def _build(original: Path, world: Path) -> None:
    shutil.copytree(original, world / "run")


def _operated(original: Path, world: Path) -> None:
    _build(original, world)
    _in_run(_apply, world)


def _in_run(act: object, world: Path) -> None:
    assert callable(act)
    act(Run.open(world / "run"))


def _apply(run: Run) -> None:
    surgery.apply(run, plan(run, from_data(RECIPE)), jobs=1)


def _undo(run: Run) -> None:
    surgery.apply(run, surgery.plan_undo(run), jobs=1)


def read(world: Path) -> str | None:
    """What a trainer that starts now would load: betas and moments are both old, or both new, or
    a file is none that loads."""
    root = world / "run"
    step = int((root / "latest_checkpointed_iteration.txt").read_text())
    folder = root / f"iter_{step:07d}"
    if not folder.is_dir():
        return f"the tracker names {step}, which is not there"
    try:
        saved = Saved.open(folder)
        if (folder / "common.pt").exists():
            common = Archive.open(folder / "common.pt").tree()
        else:
            common = saved.value("common_state/shard_0_1")[0]
        moments = [n for n in saved.items if ".exp_avg" in n]
        zeros = {
            saved.archive(i).is_zero(saved.archive(i).tree())
            for n in moments
            for i in saved.items[n]
        }
    except DamagedFile:
        return None
    groups = get(common, ("optimizer", "optimizer", "param_groups"))
    betas = {tuple(group["betas"]) for group in groups}
    whole = (betas, zeros) in (({NEW}, {True}), ({OLD}, {False}))
    return None if whole else f"step {step} has betas {betas}, zeros {zeros}"
