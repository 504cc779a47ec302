"""What lies behind a symbolic link in the run: read like all else, and never edited."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from ckptsurgeon.edits import Edit, Move, Replace
from ckptsurgeon.errors import SurgeryError


def refuse_linked(root: Path, edits: Sequence[Edit]) -> None:
    """Raise SurgeryError for an edit in a folder of the run that a link leads to, as no call that
    changes the disk goes through one (`disk`). A link itself may leave, or lead elsewhere."""
    inner = {PurePosixPath(name).parent for edit in edits for name in _names(edit)}
    for name in sorted({above for folder in inner for above in (folder, *folder.parents)}):
        link = root / name
        if ".." not in name.parts and link.is_symlink():
            here, real = shlex.quote(str(link)), link.resolve()
            there = shlex.quote(str(real))
            if real.is_relative_to(root):
                how = f"mv {there} {here}    the folder itself"
            else:
                how = f"cp -a {there} {here}    a copy of its own in the run"
            raise SurgeryError(
                f"{link} is a symbolic link to {link.readlink()}, and no edit goes through one",
                next=f"rm {here} && {how}; then the same command again",
            )


def _names(edit: Edit) -> Iterator[str]:
    if isinstance(edit, Move):
        yield from (edit.src, edit.dst)
    elif isinstance(edit, Replace):
        yield from (edit.file, edit.staged, edit.kept)
    else:
        yield edit.file
