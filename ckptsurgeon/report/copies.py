"""What was written outside the run, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import count
from ckptsurgeon.hints import command
from ckptsurgeon.report.changes import changes
from ckptsurgeon.report.document import SCHEMA, changes_json
from ckptsurgeon.report.style import Style, clean, hanging, size, table

if TYPE_CHECKING:
    from ckptsurgeon.surgery.export import Export
    from ckptsurgeon.surgery.fork import Fork


def export(folder: Path, done: Export) -> str:
    """One line, and one for each note; `files` is empty with --dry-run."""
    what = f"{count(done.tensors, 'tensor')}, {size(done.size)}"
    line = f"would write {what} to {clean(str(folder))}"
    if done.files:
        shards = count(len(done.files) - 1, "file")
        line = f"wrote {what} in {shards} and an index to {clean(str(folder))}"
    return "\n".join([line, *(f"  note     {clean(note)}" for note in done.notes)])


def export_json(folder: Path, done: Export) -> dict[str, Any]:
    """The document of `export`."""
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        "tensors": done.tensors,
        "bytes": done.size,
        "files": list(done.files),
        "notes": list(done.notes),
    }


def fork(done: Fork, how: str, style: Style, *, written: bool, launchable: bool) -> str:
    """What the fork holds, the changes in it, and what comes next: `relaunch` where the run says
    how its trainer is started; with --dry-run what it would hold."""
    what = f"step {done.step}, {count(done.files, 'file')}, {size(done.size)} by {how}"
    changed = table(changes(done.changes), style)
    notes = [line for text in done.warnings for line in hanging("  note     ", clean(text), style)]
    if not written:
        unsure = ", if the file system can (else: --hard-link or --copy)"
        what += unsure if how == "reflink" else ""
        return "\n".join([f"would make {clean(str(done.folder))}: {what}", *changed, *notes])
    receipt = [] if done.receipt is None else [f"  receipt  {done.receipt.id} {done.receipt.title}"]
    start = f"its trainer, which is to resume and save in {clean(str(done.folder))}"
    if launchable:
        start = str(command("relaunch", run=done.folder))
    return "\n".join(
        [
            f"made {clean(str(done.folder))}: {what}",
            *changed,
            *notes,
            *receipt,
            f"  status   {command('status', run=done.folder)}",
            f"  start    {start}",
        ]
    )


def fork_json(done: Fork, how: str, *, written: bool) -> dict[str, Any]:
    """The document of `fork`."""
    return {
        "schema": SCHEMA,
        "folder": str(done.folder),
        "step": done.step,
        "files": done.files,
        "bytes": done.size,
        "how": how,
        "written": written,
        "receipt": None if done.receipt is None else done.receipt.id,
        "changes": changes_json(done.changes),
        "warnings": list(done.warnings),
    }


def flags_json(flags: Sequence[str]) -> dict[str, Any]:
    """The document of `relaunch --print-flags`."""
    return {"schema": SCHEMA, "flags": list(flags)}
