"""A surgery on a checkpoint of torch.distributed: a new file, `.metadata`, sums and `common.pt`."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.files.pickles.tree import get
from tests.faults.surgeries import scenarios
from tests.faults.world import Scenario

RECIPE = {"set": {"beta1": 0.5}, "reset": ["moments"]}
OLD, NEW = (0.9, 0.95), (0.5, 0.95)


def surgeries(original: Path) -> tuple[Scenario, Scenario]:
    """Apply and undo on copies of `original`, a run of Megatron-LM."""
    return scenarios(original, RECIPE, read)[:2]


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
