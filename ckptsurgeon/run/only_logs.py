"""A folder of event files with no checkpoint beside it: logs can be cut and renamed, no more."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.layout import Format
from ckptsurgeon.hints import command


class Logs(Format):
    """The Format of a bare log directory. It has no steps and no pointers."""

    name = "logs"

    def recognizes(self, run: Path) -> bool:
        """Never by itself: only a user, or an earlier surgery, says that a folder is one."""
        return False

    def steps(self, run: Path) -> list[int]:
        """No step is saved here."""
        return []

    def directory(self, run: Path, step: int) -> Path:
        """The folder itself."""
        return run

    def entries(self, run: Path, step: int) -> list[Path]:
        """No file is a step's."""
        return []

    def files(self, run: Path, step: int) -> list[Path]:
        """No file is a step's."""
        return []

    def missing(self, run: Path, step: int) -> list[str]:
        """No shard is needed."""
        return []

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> Checkpoint:
        """Raises UsageError."""
        raise UsageError(
            f"{run} is a log directory without checkpoints",
            next=command("status", run="RUN", why="with the folder that holds the checkpoints"),
        )
