"""What each saved step is called on the disk, and which one is meant by a name."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.formats import Format


def names(format: Format, run: Path) -> list[tuple[Path, int]]:
    """The folder or the files of each step; where steps are files, the run's folder is none."""
    return [
        (path, step)
        for step in format.steps(run)
        for path in (format.directory(run, step), *format.entries(run, step))
        if path != run
    ]


def named(format: Format, run: Path, text: str) -> int | None:
    """The step of which this is the name, or the path, or those of a copy that a restart loads."""
    typed = text.rstrip("/")  # Tab adds one
    real = Path(text).resolve() if "/" in text or text in (".", "..") else None

    def meant(path: Path) -> bool:
        return typed == path.name or real == path.resolve()

    own = next((step for path, step in names(format, run) if meant(path)), None)
    if own is not None:
        return own
    copies = (format.pointed(path) for path in format.pointer_files(run) if meant(path))
    return next((step for step in copies if step in format.steps(run)), None)
