"""A file that a command writes for its user, where no file was before."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import TYPED, shell


def refuse_existing(path: Path) -> None:
    """Raise UsageError before long work where `write` would after it, as another file is there."""
    if str(path) == "-":
        raise UsageError(
            "-: the answer has a file of its own", next="choose a FILE, as ./recipe.yaml"
        )
    if disk.is_there(path):
        raise _exists(path)


def write(path: Path, data: bytes) -> None:
    """Write it whole, and never over another file. Raises UsageError where one is, or where none
    can be written."""
    refuse_existing(path)
    try:
        disk.write_new(path.parent.resolve() / path.name, data)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", next="choose a FILE in a folder that can be written"
        ) from None


def _exists(path: Path) -> UsageError:
    anew = ["ckptsurgeon", *TYPED.get().words]
    return UsageError(
        f"{path} already exists",
        next=shell(["rm", path], anew, why="writes it anew; or choose another name"),
    )
