"""The whole surgery on a run that the trainer made: real shards, pointers and event files."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.append import Archive
from ckptsurgeon.files.pickles.tree import get
from tests.faults.surgeries import scenarios
from tests.faults.world import Scenario

RECIPE = {
    "rollback": {"to": 4},
    "set": {"lr": 5e-4, "beta1": 0.5},
    "reset": ["moments"],
    "tensorboard": {"keep_as": "tb-glitch", "note": False},  # a note's name holds the time
}
OLD, NEW = (0.9, 0.95), (0.5, 0.95)


def surgeries(original: Path) -> tuple[Scenario, ...]:
    """Apply and undo of one recipe that moves, replaces and appends, and compact after it, on
    copies of `original`."""
    return scenarios(original, RECIPE, read)


def read(world: Path) -> str | None:
    """What a trainer that starts now would load: the old step as it was, the new one as it was
    edited, or at least one shard that is no archive."""
    root = world / "run"
    named = (root / "latest").read_text()
    if not (root / named).is_dir():
        return f"latest names {named!r}, which is not there"
    betas = set()
    for shard in sorted((root / named).glob("*_optim_states.pt")):
        try:
            tree = Archive.open(shard).tree()
        except DamagedFile:
            return None
        groups = get(tree, ("optimizer_state_dict", "base_optimizer_state", "param_groups"))
        betas |= {tuple(group["betas"]) for group in groups}
    wanted = {NEW} if named == "global_step4" else {OLD}
    return None if betas == wanted else f"{named} has betas {betas}"
