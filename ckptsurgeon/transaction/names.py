"""Which files an edit may name: the one check of every path of a plan, a receipt or a journal.

A run is written by others as well, and so is what lies in it. Whoever wrote a name, this holds
before anything is done with it:

- It is relative to the run, and written in the one way that has no `.`, `//` or `..` inside.
- It stays in the run, or leads into a log folder that the settings name. Outside the run only
  logs are edited, which are known by their names.
- No folder on the way to it is a symbolic link. What it names may be one: then the link is edited.
- In `.ckptsurgeon` it is in the staging or the attic of a surgery, and only an edit of files that
  come and go has such a name: nothing there is replaced, appended to or truncated.

What an edit copies bytes from is in the run or a log folder too, wherever links lead; or it is the
file that it edits, or one that the plan has fingerprinted. Reads only; what changes after the check
meets `disk`, which follows no link.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import shell
from ckptsurgeon.plans.edits import Computed, Content, Edit, Move, Replace, Span, Tail
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.transaction.home import ATTIC, HOME, is_log, staged_name

ID = re.compile(r"[0-9]{4,18}")
"""How the id of a surgery is written: at least four digits."""
RECORDS = ("tails", "jobs", "uploads", "recipe.json", "kept.json", "receipt.json", "given-up.json")
"""What lies in `staging` beside the folder of a surgery, after its id and a dot."""


def refuse_foreign(
    root: Path,
    logs: Sequence[Path] | None,
    edits: Sequence[Edit | Tail],
    where: str,
    known: AbstractSet[str] = frozenset(),
) -> None:
    """Raise SurgeryError for an edit of what is not the run's. `where` says what has the edits;
    `known` are the files that the plan has fingerprinted, which may be read anywhere.

    `logs` are the real paths of the log folders; None where nothing says which they are, as in logs
    without checkpoints. Then they are those that keep a staging or an attic for these edits."""
    passing = [name for edit in edits for name in _passing(edit)]
    run = _Bounds(root, _keeping(root, passing) if logs is None else logs, where)
    for edit in edits:
        for name in _files(edit):
            run.refuse_file(name)
        for name in _passing(edit):
            if run.aside(name):
                continue
            if isinstance(edit, Replace):
                raise run.foreign(name, "is neither staged nor in an attic")
            run.refuse_file(name)
        for name in _sources(edit):
            if name not in known and name not in _files(edit):
                run.refuse_source(name)
        for name in (*_files(edit), *_passing(edit)):
            run.enter(name)
    run.refuse_links()


def refuse_foreign_staging(
    root: Path,
    logs: Sequence[Path] | None,
    id: str,
    files: Sequence[str],
    directories: Sequence[str],
) -> None:
    """The same for the `files` that the journal of surgery `id` says are staged, and for the
    `directories` that go if they are empty."""
    if logs is None:  # what was not made yet does not say where it belongs, and need not go
        files, directories = (
            [name for name in names if not name.startswith("../") or disk.is_there(root / name)]
            for names in (files, directories)
        )
        logs = _keeping(root, files)
    run = _Bounds(root, logs, "the journal")
    if not ID.fullmatch(id):
        raise run.foreign(id, "is not the id of a surgery")
    records = [staged_name(id, record) for record in RECORDS]
    for name in files:
        if name not in records and not run.aside(name, "staging"):
            raise run.foreign(name, "is no file that a surgery stages")
        run.enter(name)
    for name in directories:
        if not run.is_log_folder(name):
            run.enter(name)
    run.refuse_links()


def edited(edits: Iterable[Edit | Tail]) -> list[str]:
    """Every file that these edits change, make or move, by each of its names."""
    return [name for edit in edits for name in (*_files(edit), *_passing(edit))]


def outside_of_the_run(edits: Iterable[Edit | Tail]) -> list[str]:
    """Those of them that lie outside of the run and are in no attic."""
    return [name for name in edited(edits) if name.startswith("../") and f"/{HOME}/" not in name]


# --- what an edit names --------------------------------------------------------------------------


def _files(edit: Edit | Tail) -> Iterator[str]:
    """What is there before and after: a file of the run."""
    if not isinstance(edit, Move):
        yield edit.file


def _passing(edit: Edit | Tail) -> Iterator[str]:
    """What comes or goes: from the staging, or to or from the attic."""
    if isinstance(edit, Move):
        yield from (edit.src, edit.dst)
    elif isinstance(edit, Replace):
        yield from (edit.staged, edit.kept)


def _sources(edit: Edit | Tail) -> Iterator[str]:
    """What bytes, or rights, are copied from."""
    content = edit.content if isinstance(edit, (Move, Replace)) else None
    if isinstance(edit, Move) and edit.like is not None:
        yield edit.like
    if isinstance(content, Queries):
        yield content.file
    for piece in content.pieces if isinstance(content, Content) else ():
        if isinstance(piece, Span):
            yield piece.file
        elif isinstance(piece, Computed):
            sources = (source for term in piece.terms for source in term)
            yield from (file for source in sources for file, _, _ in source.ranges())


def _keeping(root: Path, names: Iterable[str]) -> list[Path]:
    """The folders outside of the run that have the staging or the attic of these names."""
    folders: dict[Path, None] = {}
    for name in names:
        beside, _, inner = name.partition(f"/{HOME}/")
        kind, _, id = posixpath.dirname(inner).partition("/")
        id = id.partition("/")[0]
        if name.startswith("../") and kind in ("staging", ATTIC) and ID.fullmatch(id):
            folder = Path(posixpath.normpath(f"{root}/{beside}"))
            if disk.is_folder(folder / HOME / kind / id):
                folders[folder] = None
    return list(folders)


# --- where a name leads --------------------------------------------------------------------------


class _Bounds:
    """A run and its log folders, which no name of `where` may leave."""

    def __init__(self, root: Path, logs: Sequence[Path], where: str) -> None:
        self.root = root
        self.logs = [str(folder).rstrip("/") for folder in logs]
        self.where = where
        self._entered: dict[str, str] = {}
        self._read: set[str] = set()
        self._real_folders: dict[str, str] = {}

    def below(self, name: str) -> dict[str, tuple[str, ...]]:
        """The folder that `name` may not leave, with the parts of the name below it: the run, or
        each log folder that it is in. Raises SurgeryError where there is none."""
        written = name and "\0" not in name and posixpath.normpath(name) == name
        if not written or name.startswith("/") or name in (".", ".."):
            raise self.foreign(name, "is no path as edits have it")
        if not name.startswith("../"):
            return {str(self.root): tuple(name.split("/"))}
        path = posixpath.normpath(f"{self.root}/{name}")
        found = {
            folder: tuple(path[len(folder) + 1 :].split("/"))
            for folder in self.logs
            if path.startswith(f"{folder}/")
        }
        if not found:
            raise self.foreign(name, "lies outside of the run and of its log folders")
        return found

    def aside(self, name: str, *kinds: str) -> bool:
        """Whether it lies in the staging or the attic of a surgery."""
        return any(
            len(parts) > 3
            and parts[0] == HOME
            and parts[1] in (kinds or ("staging", ATTIC))
            and ID.fullmatch(parts[2]) is not None
            for parts in self.below(name).values()
        )

    def refuse_file(self, name: str) -> None:
        """Raise unless it is a file of the run, or a log in a log folder."""
        self.below(name)
        if HOME in name.split("/"):
            raise self.foreign(name, f"is in {HOME}, where only surgeries keep what they need")
        if name.startswith("../") and not is_log(name):
            raise self.foreign(name, "lies outside of the run and is no log")

    def refuse_source(self, name: str) -> None:
        """Raise unless it is in the run or in a log folder, wherever links on the way lead."""
        self.below(name)
        if name not in self._read:
            self._read.add(name)
            real = self._real(name)
            own = (os.path.realpath(self.root), *self.logs)
            if not any(real.startswith(f"{folder}/") for folder in own):
                raise self.foreign(name, "leads out of the run, and the plan did not read it")

    def _real(self, name: str) -> str:
        """Where links lead to; the way to a folder is walked once for all its files."""
        folder, _, last = name.rpartition("/")
        if folder not in self._real_folders:
            self._real_folders[folder] = os.path.realpath(f"{self.root}/{folder}")
        path = f"{self._real_folders[folder]}/{last}"
        return os.path.realpath(path) if disk.is_link(path) else path

    def is_log_folder(self, name: str) -> bool:
        """Whether it is one of the log folders itself."""
        return posixpath.normpath(f"{self.root}/{name}") in self.logs

    def foreign(self, name: str, what: str) -> SurgeryError:
        return SurgeryError(
            f"{self.where}: {name!r} {what}, so nothing is done with it",
            next=f"find out who wrote it; a log folder of the run belongs in `tensorboard:` of "
            f"{self.root / 'ckptsurgeon.yaml'}",
        )

    # --- links -----------------------------------------------------------------------------------

    def enter(self, name: str) -> None:
        """Note the folder of what is to be changed, and the one above it that is not left."""
        self._entered[posixpath.dirname(name)] = min(self.below(name), key=len)

    def refuse_links(self) -> None:
        """Raise where a folder is a symbolic link on the way to what is to be changed: no call that
        changes the disk goes through one."""
        seen: set[str] = set()
        for folder, stop in sorted(self._entered.items()):
            path = posixpath.normpath(f"{self.root}/{folder}")
            way = []
            while len(path) > len(stop) and path not in seen:
                way.append(path)
                path = posixpath.dirname(path)
            seen.update(way)
            for path in reversed(way):
                if disk.is_link(path):
                    raise self._linked(Path(path))

    def _linked(self, link: Path) -> SurgeryError:
        real = link.resolve()
        own = ["cp", "-a", real, link], "a copy of its own in the run"
        if real.is_relative_to(self.root):
            own = ["mv", real, link], "the folder itself"
        return SurgeryError(
            f"{link} is a symbolic link to {link.readlink()}, and no edit goes through one",
            next=shell(["rm", link], own[0], why=f"{own[1]}; then the same command again"),
        )
