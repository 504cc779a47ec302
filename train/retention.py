"""Removes old checkpoints of the branch in use, and nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from .run_folder import LATEST, LATEST_ITERATION, checkpoints

REMOVED = ".{name}.removed"
LEFT = re.compile(r"\.global_step\d+\.removed")


def remove_old(root: Path, step: int, keep_last: int, spare: Collection[int] = ()) -> list[int]:
    """Keep the `keep_last` newest checkpoints up to `step`, which has just been saved; remove the
    older ones and return their steps.

    Counted and removed are only folders `global_step<N>` of this branch: none above `step`, none
    that an earlier step outdates (a rollback left it), no symbolic link, and none that lacks a
    shard which the newest has. What a pointer names and the steps in `spare` stay. A folder is
    renamed before its files go, so that no half of a checkpoint ever has a checkpoint's name.
    """
    for left in root.iterdir():
        if LEFT.fullmatch(left.name) and not left.is_symlink():
            shutil.rmtree(left)
    branch = _branch(root, step)
    if len(branch) <= keep_last:
        return []
    stay = {*branch[-keep_last:], *spare, *_pointed(root)}
    old = [number for number in branch if number not in stay]
    for number in old:
        name = f"global_step{number}"
        shutil.rmtree((root / name).rename(root / REMOVED.format(name=name)))
    return old


def _branch(root: Path, step: int) -> list[int]:
    """The complete checkpoints up to `step` that led to it, ascending."""
    folders = {int(name.removeprefix("global_step")): root / name for name in checkpoints(root)}
    wanted = _shards(folders[step])
    found: list[int] = []
    latest = 0.0
    for number in sorted(folders):
        shards = {} if folders[number].is_symlink() else _shards(folders[number])
        if number > step or wanted.keys() - shards.keys():
            continue
        saved = max(shards.values())
        if saved < latest and number != step:
            continue  # older than a lower step: from before a rollback
        latest = max(latest, saved)
        found.append(number)
    return found


def _shards(folder: Path) -> dict[str, float]:
    """Shard → when it was written."""
    return {path.name: path.stat().st_mtime for path in folder.glob("*.pt")}


def _pointed(root: Path) -> set[int]:
    named = set()
    for pointer in (LATEST, LATEST_ITERATION):
        try:
            text = (root / pointer).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if match := re.fullmatch(r"(?:global_step)?(\d+)", text):
            named.add(int(match[1]))
    return named
