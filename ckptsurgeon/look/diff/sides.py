"""What a diff is taken of: a saved step, or a whole run."""

from __future__ import annotations

import re
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.formats.detect import is_run
from ckptsurgeon.formats.layout import NamesEpochs
from ckptsurgeon.look.diff.versions import TREES, Version
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run.run import CONFIG, Run
from ckptsurgeon.run.search import SETTINGS
from ckptsurgeon.transaction.home import is_log

NUMBER = re.compile(r"\d{1,18}")


@frozen
class Side:
    """A run, and the step of it that is meant; None: all of it."""

    run: Run
    step: int | None

    @classmethod
    def parse(cls, text: str, here: Run | None) -> Side:
        """`STEP` of the run `here`, `RUN:STEP`, or `RUN`; a step by its number, the name of its
        folder or `latest`. Raises UsageError for a step that is not saved, SurgeryError for one
        that is incomplete."""
        folder, _, name = text.rpartition(":")
        if folder and disk.is_folder(Path(folder)):
            return cls._of(Run.open(Path(folder)), name)
        if here is not None and (NUMBER.fullmatch(text) or not _is_run(Path(text))):
            return cls._of(here, text)
        if NUMBER.fullmatch(text) and not disk.is_folder(Path(text)):
            Run.open(Path())  # a step of no run; it says so
        return cls(Run.open(Path(text)), None)

    @classmethod
    def _of(cls, run: Run, name: str) -> Side:
        step = int(name) if NUMBER.fullmatch(name) else run.step(name)
        run.checkpoint(step)
        return cls(run, step)

    def __str__(self) -> str:
        return f"{self.run.name}" if self.step is None else f"{self.run.name}, step {self.step}"

    def files(self) -> dict[str, Version]:
        """The files of its step by a name that the same file of another step has too."""
        assert self.step is not None
        pointers = set(self.run.format.pointer_files(self.run.root))
        paths = self.run.format.files(self.run.root, self.step)
        # A pointer may be a copy of a whole folder, and all that is left of the step.
        own = [path for path in paths if pointers.isdisjoint((path, *path.parents))]
        return {self.name(path): Version(path) for path in own or paths}

    def name(self, path: Path) -> str:
        """The path inside the folder of the step, or that from the root without the number."""
        assert self.step is not None
        if isinstance(self.run.format, NamesEpochs):
            return self.run.format.common(path.name)
        folder = self.run.directory(self.step)
        if folder != self.run.root and path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
        first, _, rest = self.run.relative(path).partition("/")
        first = re.sub(rf"(?<!\d)0*{self.step}(?!\d)", "N", first, count=1)
        return f"{first}/{rest}" if rest else first

    def places(self) -> dict[str, str]:
        """Name → the path from the root."""
        return {name: self.run.relative(v.path) for name, v in self.files().items()}

    def saved(self, step: int) -> dict[str, Version]:
        """The files of one of its steps by their path from the root, pointers apart."""
        pointers = set(self.run.format.pointer_files(self.run.root))
        paths = self.run.format.files(self.run.root, step)
        return {self.run.relative(p): Version(p) for p in paths if p not in pointers}

    def copies(self) -> dict[str, Version]:
        """The pointers that are copies of shards."""
        pointers = self.run.format.pointer_files(self.run.root)
        paths = [path for path in pointers if disk.is_file(path) and path.name.endswith(TREES)]
        return {self.run.relative(path): Version(path) for path in paths}

    def texts(self) -> dict[str, Version]:
        """The other pointers, links to folders too, and what says how the run is started."""
        pointers = self.run.format.pointer_files(self.run.root)
        links = [path for path in pointers if disk.is_link(path) and disk.is_folder(path)]
        paths = [path for path in pointers if not path.name.endswith(TREES)]
        paths += [self.run.root / name for name in (SETTINGS, CONFIG)]
        found = [*(path for path in paths if disk.is_file(path)), *links]
        return {self.run.relative(path): Version(path) for path in found}

    def logs(self) -> dict[str, Version]:
        """Its logs, those of abandoned branches too."""
        logs = self.run.logs
        folders = (folder for folder in sorted(logs.branches()) if disk.is_folder(folder))
        below = (path for folder in folders for path in sorted(folder.iterdir()))
        cut = (path for path in below if is_log(str(path)))
        paths = (*logs.all(), *cut)
        return {self.run.relative(path): Version(path) for path in paths}


def _is_run(folder: Path) -> bool:
    """Whether this very folder is a run's root, and not one of its steps."""
    return disk.is_folder(folder) and is_run(folder.resolve())
