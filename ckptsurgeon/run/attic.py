"""What past surgeries keep in the attic: its size, and `prune`, which removes it for good."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction import given_up, kept, lock
from ckptsurgeon.transaction.home import ATTIC, HOME, KEPT_EVENTS, RECEIPTS, has_receipts
from ckptsurgeon.transaction.worker import as_owner


@frozen
class Attic:
    """What surgery `id` moved aside or replaced. `bytes` are those allocated on disk; there is a
    folder in the run, and one beside each log folder on another file system. `stays` says why it is
    not removed, where no record says that it may be."""

    id: str
    title: str
    files: int
    bytes: int
    folders: tuple[Path, ...]
    stays: str = ""


def attics(run: Run) -> list[Attic]:
    """All that has something in it, oldest first."""
    titles = {receipt.id: receipt.title for receipt in run.receipts()}
    over = {item.receipt.id: f"given up: {item.receipt.title}" for item in given_up.read(run.root)}
    titles = {**over, **titles}
    wrong = run.damaged_receipts()
    places = _places(run)
    out = []
    for id in sorted(
        {path.name for place in places if disk.is_folder(place) for path in place.iterdir()}
    ):
        files = [file for place in places for file in _files(run, place / id)]
        if files:
            size = sum(os.lstat(file).st_blocks * 512 for file in files)
            existing = tuple(place / id for place in places if disk.is_folder(place / id))
            stays = "" if id in titles else wrong.get(id, "no receipt says what it is")
            out.append(Attic(id, titles.get(id, ""), len(files), size, existing, stays))
    return out


def folders(run: Run, id: str) -> list[Path]:
    """Where the attic of surgery `id` may be."""
    return [place / id for place in _places(run)]


def _places(run: Run) -> list[Path]:
    """Where attics may be. A log folder that has receipts is a run of its own, and what it keeps is
    its own."""
    beside = [folder for folder in run.logs.roots() if not has_receipts(folder)]
    return [folder / HOME / ATTIC for folder in dict.fromkeys([run.root, *beside])]


def prune(run: Run, chosen: Sequence[Attic]) -> None:
    """Remove these attics. Their surgeries, and all before them, can't be undone any more.

    A marker is durable before the first file goes, so that an undo never begins on half an attic;
    cut off in between, the same call again removes the rest. Raises OSError as the disk does."""
    inside = [run.relative(folder) for item in chosen for folder in item.folders]
    with as_owner(run.root, inside), lock.hold(run.root, "prune"):
        for item in chosen:
            marker = run.root / pruned(item.id)
            if not disk.exists(marker):
                disk.write_new(marker, b"")
                disk.fsync_directory(marker.parent)
            for folder in item.folders:
                for file in list(_files(run, folder)):
                    disk.remove_file(file)
                for inner, _, _ in list(os.walk(folder, topdown=False)):
                    if not any(Path(inner).iterdir()):
                        disk.remove_directory(Path(inner))
                disk.fsync_directory(folder.parent)


def pruned(id: str) -> str:
    """The marker, below the root, that the attic of surgery `id` is gone or going."""
    return f"{HOME}/{RECEIPTS}/{id}/pruned"


def _files(run: Run, folder: Path) -> Iterator[Path]:
    """Outside of the run event files alone, as surgeries keep nothing else there."""
    inside = folder.is_relative_to(run.root)
    return (path for path in kept.files(folder) if inside or KEPT_EVENTS in path.name)
