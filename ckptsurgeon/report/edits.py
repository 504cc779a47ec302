"""What edits do to files, as rows of a table: read off the edits, whatever else is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from ckptsurgeon.plans.edits import Edit, Move, Replace, Tail, Truncate
from ckptsurgeon.report.style import Row, clean, names
from ckptsurgeon.transaction.home import HOME, in_attic

BACK = "brings back"
RENAMES = "renames"


def acts(edits: Sequence[Edit | Tail]) -> dict[str, list[str]]:
    """What is done → the files that it is done to, each once, as edits name them."""
    out: dict[str, dict[str, None]] = {}
    for edit in edits:
        act, file = _act(edit)
        out.setdefault(act, {})[file] = None
    return {act: list(files) for act, files in out.items()}


def edits(edits: Sequence[Edit | Tail], *, whole: bool = False) -> list[Row]:
    """The same as rows, one for each folder; unless `whole`, a few of many files."""
    listed = " ".join if whole else names
    rows = []
    for act, files in acts(edits).items():
        folders: dict[str, list[str]] = {}
        for file in files:
            path = PurePosixPath(file)
            folder, name = str(path.parent), path.name
            if act == RENAMES:
                folder, name = ".", file
            folders.setdefault(folder, []).append(name)
        for folder, inner in folders.items():
            where = "" if folder == "." else f"in {clean(folder)}"
            rows.append(Row("files", f"{act} {listed([clean(name) for name in inner])}", where))
    return rows


def _act(edit: Edit | Tail) -> tuple[str, str]:
    if isinstance(edit, Truncate):
        return "cuts back", edit.file
    if isinstance(edit, Replace):
        return (BACK if in_attic(edit.staged) else "rewrites"), edit.file
    if isinstance(edit, Move):
        if in_attic(edit.src):
            return BACK, edit.dst
        if HOME in edit.src.split("/"):
            return "makes", edit.dst
        if HOME in edit.dst.split("/"):
            return "takes away", edit.src
        return RENAMES, f"{edit.src} → {edit.dst}"
    return "appends to", edit.file
