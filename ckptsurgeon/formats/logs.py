"""A folder of event files with no checkpoint beside it: logs can be cut and renamed, no more."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats import Checkpoint


class Logs:
    """The Format of a bare log directory. It has no steps and no pointers."""

    name = "logs"
    flags: Mapping[str, str] = {}

    def recognizes(self, run: Path) -> bool:
        """Never by itself: only a user, or an earlier surgery, says that a folder is one."""
        return False

    def steps(self, run: Path) -> list[int]:
        """None."""
        return []

    def directory(self, run: Path, step: int) -> Path:
        """The folder itself."""
        return run

    def entries(self, run: Path, step: int) -> list[Path]:
        """Nothing."""
        return []

    def files(self, run: Path, step: int) -> list[Path]:
        """Nothing."""
        return []

    def missing(self, run: Path, step: int) -> list[str]:
        """Nothing."""
        return []

    def strays(self, run: Path, step: int) -> list[str]:
        """Nothing."""
        return []

    def pointers(self, run: Path, step: int) -> dict[Path, str]:
        """None."""
        return {}

    def pointed(self, pointer: Path) -> int | None:
        """None."""
        return None

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> Checkpoint:
        """Raises UsageError."""
        raise UsageError(
            f"{run} is a log directory without checkpoints",
            next="ckptsurgeon status -C RUN    with the folder that holds the checkpoints",
        )
