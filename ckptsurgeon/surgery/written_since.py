"""What a trainer wrote since a surgery: an undo moves it to the attic, and a redo back."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from ckptsurgeon import disk
from ckptsurgeon.plans.edits import Relink
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.remote import reads
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.home import EVENTS, is_wandb, is_wandb_run, stored_run


def checkpoints(run: Run, steps: Collection[int], known: Collection[str]) -> list[str]:
    """What is of a saved step that is none of `steps`; what holds a `known` file is none of it."""
    edited = {*known, *_above(known)}
    newer = (step for step in run.steps() if step not in steps)
    names = (run.relative(path) for step in newer for path in run.entries(step))
    return [name for name in names if name not in edited]


def copies(run: Run, receipt: Receipt, known: Collection[str]) -> list[str]:
    """The copies, which a restart loads, of a saved step that was not there: what an older one is a
    copy of stays, and so does a link."""
    assert receipt.step is not None
    pointers = run.format.pointers(run.root, receipt.step)
    own = [path for path, text in pointers.items() if isinstance(text, Path)]
    folders = {above for path in own for above in path.parents if run.root in above.parents}
    there = [
        path for path in (*own, *sorted(folders)) if disk.exists(path) and not disk.is_link(path)
    ]
    held = {*known, *_above(known)}
    return [
        name
        for path in there
        if (name := run.relative(path)) not in held
        and (named := run.format.pointed(path)) is not None
        and named not in receipt.steps
    ]


def logs(run: Run, known: Collection[str]) -> list[str]:
    """The logs that are not `known`. A run of W&B, or of MLflow's files, is the whole folder that
    its library made for it; one with event files goes log by log, as no attic has a folder that
    TensorBoard would load."""
    new = [file for file in run.logs.written() if file not in known]
    if reads.current() is not None:  # a bucket has no folders
        return new
    held = _above(known)
    whole: dict[str, bool] = {}
    for folder in filter(None, map(_run_folder, new)):
        if folder not in whole:
            whole[folder] = folder not in held and not _has_events(run.root / folder)
    names = ((file, _run_folder(file)) for file in new)
    return list(dict.fromkeys(own if own and whole[own] else file for file, own in names))


def links(
    run: Run, gone: Iterable[str], before: Iterable[str], known: Collection[str]
) -> tuple[list[Relink], list[str]]:
    """What becomes of the links of W&B, `latest-run` and others, that lead into runs which are
    `gone`: they lead to the newest one of the logs from `before`, or go as well. Those that are
    `known`, or lie outside of the run, stay as they are."""
    older = _wandb_runs(filter(None, map(_run_folder, before)))
    relinked: list[Relink] = []
    aside: list[str] = []
    for place, names in _wandb_runs(gone).items():
        folder = run.root / place
        newest = sorted(older.get(place, ()), key=lambda name: name.removeprefix("offline-"))[-1:]
        for link in sorted(filter(disk.is_link, folder.iterdir())):
            old, file = str(link.readlink()), run.relative(link)
            first, slash, rest = old.partition("/")
            if first not in names or file in known:
                continue
            if newest and disk.is_there(folder / newest[0] / rest):
                relinked.append(Relink(file, "logs", old, f"{newest[0]}{slash}{rest}"))
            else:
                aside.append(file)
    return relinked, aside


def _wandb_runs(folders: Iterable[str]) -> dict[str, set[str]]:
    """The names of the runs of W&B among these, by the folder of the run that they are in."""
    beside: dict[str, set[str]] = {}
    for name in map(PurePosixPath, folders):
        if is_wandb_run(name.name) and name.parts[0] != "..":
            beside.setdefault(str(name.parent), set()).add(name.name)
    return beside


def _run_folder(file: str) -> str | None:
    """The folder that a library made for the run of which this is a log."""
    path = PurePosixPath(file)
    if is_wandb(path.name) and is_wandb_run(path.parent.name):
        return str(path.parent)
    return stored_run(file)


def _has_events(folder: Path) -> bool:
    return any(EVENTS in name for _, _, files in disk.walk(folder) for name in files)


def _above(files: Iterable[str]) -> set[str]:
    """Every folder that one of these is in."""
    return {str(parent) for file in files for parent in PurePosixPath(file).parents}
