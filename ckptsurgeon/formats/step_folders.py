"""A folder for each step: what formats of that layout share."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.one_look import once
from ckptsurgeon.formats.layout import Format

NUMBERED = re.compile(r"(?P<name>.*?)(?P<number>\d{1,18})")


def number_of(name: str) -> int | None:
    """The step that a file or folder of a step is named after, whatever trainer saved it: before it
    may be an epoch, and after it a rank, which are lower. What was measured (`loss=0.44`) is none.
    """
    numbers = re.findall(r"\d{1,18}", re.sub(r"\d+\.\d+", "", name))
    return max(map(int, numbers), default=None)


class StepFolders(Format, ABC):
    """A format says by `is_step` which folders are steps."""

    @abstractmethod
    def is_step(self, folder: Path) -> bool:
        """Whether a folder with a number at the end of its name is one saved step."""

    def recognizes(self, run: Path) -> bool:
        """True with a folder that is such a step."""
        return bool(self.steps(run))

    def steps_in(self, run: Path) -> Path:
        """The folder that holds the steps' folders: the run's own root."""
        return run

    @once
    def _found(self, run: Path) -> dict[int, list[Path]]:
        folders: dict[int, list[Path]] = {}
        above = self.steps_in(run)
        for name in folders_in(above) if listed(above) else ():
            match = NUMBERED.fullmatch(name)
            if match and self.is_step(above / name):
                folders.setdefault(int(match["number"]), []).append(above / name)
        return folders

    def steps(self, run: Path) -> list[int]:
        """The numbers of the folders."""
        return sorted(self._found(run))

    def directory(self, run: Path, step: int) -> Path:
        """The folder. Two of one number are told apart by nobody: refused."""
        folders = self._found(run).get(step, [run / str(step)])
        if len(folders) > 1:
            names = ", ".join(folder.name for folder in folders)
            raise SurgeryError(
                f"{names} have the same number, so which one is step {step} is not known",
                next="move those that the run does not go on from into another folder",
            )
        return folders[0]

    def entries(self, run: Path, step: int) -> list[Path]:
        """Every folder of that number."""
        return list(self._found(run).get(step, []))

    def files(self, run: Path, step: int) -> list[Path]:
        """All that lies in the folder and below it."""
        return files_below(self.directory(run, step))


def files_below(folder: Path) -> list[Path]:
    """Every file in the folder and in those inside it, ascending; links to folders lead nowhere.
    Raises OSError where one of them can't be listed: the others alone are not the step."""
    return sorted(Path(here, name) for here, _, names in disk.walk(folder) for name in names)


@once
def folders_in(folder: Path) -> list[str]:
    """The names of the folders in it, and of links to folders, ascending; files beside them are not
    looked at. Raises OSError."""
    return sorted(name for name, (is_folder, _) in _kinds(folder).items() if is_folder)


def is_link(path: Path) -> bool:
    """Whether it is a symbolic link, by the listing of the folder in which it lies."""
    try:
        return _kinds(path.parent).get(path.name, (False, False))[1]
    except OSError:
        return False


@once
def _kinds(folder: Path) -> dict[str, tuple[bool, bool]]:
    """The name of each entry: whether it is a folder, or leads to one, and whether it is a link."""
    with os.scandir(folder) as entries:
        return {entry.name: (entry.is_dir(), entry.is_symlink()) for entry in entries}


@once
def listed(folder: Path) -> list[str]:
    """What is in the folder; nothing if it may not be read, as some beside a run may not. Raises
    OSError where it can't be read for another reason."""
    return disk.names_in(folder)
