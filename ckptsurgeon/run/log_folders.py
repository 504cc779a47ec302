"""Where the logs of a run are, and which of them its trainer wrote."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats import Format
from ckptsurgeon.formats.layout import LogsBeside
from ckptsurgeon.plans.edits import Move, relative
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.run import strangers
from ckptsurgeon.run.only_logs import Logs
from ckptsurgeon.transaction import receipts
from ckptsurgeon.transaction.home import (
    EVENTS,
    HOME,
    NOTE,
    ROWS,
    is_database,
    is_log,
    is_stored,
    is_stored_run,
    is_wandb,
)

MAY_BE = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".log", ".txt")
"""How a file may be called that is a log of lines. Lines that were printed are none: they tell what
happened."""
MOST = 200
"""How many files that may be logs are looked into."""
ABOVE = 2
"""So far above the run a log folder may be that holds it: further up are the logs of others."""

if TYPE_CHECKING:
    from ckptsurgeon.logs.likely import Likely
    from ckptsurgeon.logs.source import LogSource


@frozen
class LogFiles:
    """Folders with event files; tables and JSON lines; files of runs of W&B; databases of
    trackers; folders of runs in MLflow's file store."""

    folders: list[Path]
    rows: list[Path]
    wandb: list[Path]
    databases: list[Path]
    stored: list[Path]

    def others(self) -> list[Path]:
        """All but event files."""
        found = [*self.rows, *self.wandb, *self.databases]
        if self.stored:
            from ckptsurgeon.logs.mlruns.run_folder import RunFolder

            found += [path for folder in self.stored for path in RunFolder(folder).texts()]
        return found


@frozen
class LogFolders:
    """The logs of the run at `root`, event files and others: in the folders that its settings name,
    or else in the root, at any depth, but in no checkpoint. Reads only, again at each call."""

    root: Path
    format: Format
    settings: Mapping[str, Any]

    def lacking(self) -> list[str]:
        """The folders of the settings that are not there."""
        named = self.settings.get("tensorboard", [])
        names = map(str, named if isinstance(named, list) else [named])
        return [name for name in names if not disk.is_folder(self._real(name))]

    def roots(self) -> list[Path]:
        """Where they are looked for: the folders of the settings, links among them resolved, or
        the root. Raises UsageError for one that holds the run and much else."""
        usual = self.format.log_folders(self.root) if isinstance(self.format, LogsBeside) else ["."]
        named = self.settings.get("tensorboard", list(usual))
        names = named if isinstance(named, list) else [named]
        return [self._real(str(item)) for item in names]

    def named(self) -> list[Path] | None:
        """The same, as far as they bound what is edited; None for logs without checkpoints that no
        settings name, where what was done to others with them stands in the receipts alone."""
        bare = "tensorboard" not in self.settings and isinstance(self.format, Logs)
        return None if bare else self.roots()

    def _real(self, name: str) -> Path:
        folder = Path(os.path.realpath(self.root / name))
        if folder in self.root.parents[ABOVE:] or folder == Path("/"):
            raise UsageError(
                f"{self.root}: {name!r} can't be its log folder: {folder} holds the run, and the "
                "logs of other runs as well",
                next="name the folder of its own event files in `tensorboard:` of ckptsurgeon.yaml",
            )
        return folder

    def by_kind(self) -> LogFiles:
        """By one walk; a file that the settings name is a table, if it is no database by its name.
        What a surgery made to keep a cut branch is not among them. Raises UsageError for a log of
        the settings that is not there, or not in the run."""
        seen = self._seen()
        for path in self._named_files():
            kind = seen.databases if is_database(path.name) else seen.rows
            kind += [path] if path not in kind else []
        return seen

    def sources(self) -> list[LogSource]:
        """Each of them, as what cuts, renames and notes. A kind of log that the run has not is not
        imported."""
        files = self.by_kind()
        sources: list[LogSource] = []
        if files.folders:
            from ckptsurgeon.logs.event_folder import EventFolder

            sources += [EventFolder(path, self.root) for path in files.folders]
        if files.rows:
            from ckptsurgeon.logs.row_file import RowFile

            sources += [RowFile(path, self.root) for path in files.rows]
        if files.wandb:
            from ckptsurgeon.logs.wandb import offline_run

            sources += offline_run.found(files.wandb, self.root)
        if files.databases:
            from ckptsurgeon.logs.databases import found

            sources += found.found(files.databases, self.root, self.tracker_runs())
        if files.stored:
            from ckptsurgeon.logs.mlruns import store

            sources += store.found(files.stored, self.root, self.tracker_runs())
        return sources

    def tracker_runs(self) -> list[str]:
        """The runs in databases of trackers that the settings name."""
        names = self.settings.get("tracker_runs", [])
        return [str(name) for name in (names if isinstance(names, list) else [names])]

    def offset(self) -> int | None:
        """By how much the number of a step's last update in its logs is more than that of the step,
        as the settings or the format say; None where neither does."""
        said = self.settings.get("log_offset")
        own = self.format.log_offset if isinstance(self.format, LogsBeside) else None
        return own if said is None else int(said)

    def _seen(self) -> LogFiles:
        branches = self.branches()
        folders: list[Path] = []
        rows: list[Path] = []
        runs: list[Path] = []
        databases: list[Path] = []
        stored: list[Path] = []
        for here, inner, files in self._walk():
            if here in branches:
                continue
            if any(EVENTS in name for name in files):
                folders.append(here)
            rows += [here / name for name in ROWS if name in files]
            if here.name.startswith(("offline-run-", "run-")):
                runs += [here / name for name in sorted(filter(is_wandb, files))]
            databases += [here / name for name in sorted(filter(is_database, files))]
            if is_stored_run(here, inner, files):
                stored.append(here)
        paged = self.format.log_files if isinstance(self.format, LogsBeside) else ()
        for named in (
            disk.matching(root, each, past_closed=True) for root in self.roots() for each in paged
        ):
            rows += [
                path
                for path in named
                if path.parent not in branches
                and (path.is_relative_to(self.root) or is_log(str(path)))
            ]
        trackers = _trackers(_own(databases))
        return LogFiles(list(dict.fromkeys(folders)), _own(rows), _own(runs), trackers, stored)

    def folders(self) -> list[Path]:
        """Folders with event files."""
        return self._seen().folders

    def branches(self) -> set[Path]:
        """Folders that surgeries made for cut branches: no trainer writes there."""
        branches: set[Path] = set()
        for receipt in receipts.read(self.root, mentioning=(EVENTS, ".csv", ".jsonl", ".wandb")):
            if receipt.undoes is None and not _brings(receipt):
                branches |= self._cut_branches(receipt)
        return branches

    def files(self) -> list[Path]:
        """All event files in those folders, notes about surgeries among them."""
        return _events(self.folders())

    def event_files(self) -> list[str]:
        """Those without the notes, relative to the root."""
        return self._without_notes(self.files())

    def others(self) -> list[Path]:
        """All logs that are no event files."""
        return self.by_kind().others()

    def all(self) -> list[Path]:
        """All logs, notes about surgeries among them."""
        files = self.by_kind()
        return [*_events(files.folders), *files.others()]

    def _without_notes(self, files: Iterable[Path]) -> list[str]:
        return [relative(file, self.root) for file in files if not file.name.endswith(NOTE)]

    def _named_files(self) -> Iterator[Path]:
        names = self.settings.get("logs", [])
        for name in names if isinstance(names, list) else [names]:
            path = Path(os.path.realpath(self.root / str(name)))
            if not disk.is_file(path):
                raise UsageError(
                    f"{self.root}: its log {str(name)!r} is not there",
                    next="name a file in `logs:` of ckptsurgeon.yaml, or nothing",
                )
            if not path.is_relative_to(self.root):
                raise UsageError(
                    f"{self.root}: its log {str(name)!r} lies outside of it, at {path}",
                    next="name its folder in `tensorboard:` of ckptsurgeon.yaml; there logs with "
                    f"these names are edited: {', '.join(ROWS)}",
                )
            yield path

    def written(self) -> list[str]:
        """All logs that the trainer wrote, relative to the root."""
        return [relative(path, self.root) for path in self.all() if not path.name.endswith(NOTE)]

    def sizes(self) -> dict[str, int]:
        """The bytes of each of `written`."""
        out = {}
        for name in self.written():
            with contextlib.suppress(OSError):
                out[name] = (self.root / name).stat().st_size
        return out

    def links(self) -> list[str]:
        """Links to folders with event files: nothing follows them, as they may lead anywhere."""
        links = []
        for here, inner, _ in self._walk():
            for link in (here / name for name in inner):
                with contextlib.suppress(OSError):
                    if disk.is_link(link) and any(EVENTS in n.name for n in link.iterdir()):
                        links.append(relative(link, self.root))
        return links

    def strangers(self) -> list[tuple[str, str]]:
        """Folders with logs that nothing is done with, each with the tracker that wrote them."""
        found = []
        for here, inner, files in self._walk():
            tracker = strangers.tracker(here, inner, files)
            if tracker is not None:
                found.append((relative(here, self.root), tracker))
                inner.clear()
        return found

    def unnamed(self) -> list[tuple[str, Likely]]:
        """Files that may be logs by what is in them, and are none by their names, each with what
        speaks for it. Of MOST files, and of each its head and its end."""
        known, branches = {*self.by_kind().rows}, self.branches()
        paths: list[Path] = []
        for here, inner, files in self._walk():
            if strangers.tracker(here, inner, files) is not None:
                inner.clear()
                continue
            if here in branches:
                continue
            names = (name for name in sorted(files) if name.endswith(MAY_BE) and name not in ROWS)
            paths += (path for path in _own(here / n for n in names) if path not in known)
        if not paths:
            return []
        from ckptsurgeon.logs.likely import likely

        found = ((path, likely(path)) for path in paths[:MOST])
        return [(relative(path, self.root), what) for path, what in found if what is not None]

    def _walk(self) -> Iterator[tuple[Path, list[str], list[str]]]:
        """Folder, folders in it and files in it, wherever logs may be."""
        is_made = disk.is_folder(self.root)  # a fork is not, before it is done
        steps = self.format.steps(self.root) if is_made else []
        checkpoints = {path for step in steps for path in self.format.entries(self.root, step)}
        for root in self.roots():
            for folder, inner, files in disk.walk(root, past_closed=True):
                here = Path(folder)
                inner[:] = sorted(n for n in inner if n != HOME and here / n not in checkpoints)
                yield here, inner, files

    def _cut_branches(self, receipt: Receipt) -> set[Path]:
        """Folders that a surgery made for cut branches. Where it also replaced a file or moved one
        aside, the run writes its logs: a cut file may get another name there."""
        made, written = set(), set()
        for edit in receipt.inverse:
            if isinstance(edit, Move) and is_stored(edit.src):  # a run like others, by its tag
                continue
            if isinstance(edit, Move) and is_log(edit.src) and not edit.src.endswith(NOTE):
                made.add(edit.src)
            elif is_log(file := edit.dst if isinstance(edit, Move) else edit.file):
                written.add(file)
        return {self._folder(file) for file in made} - {self._folder(file) for file in written}

    def _folder(self, file: str) -> Path:
        return Path(os.path.normpath(self.root / file)).parent


def _brings(receipt: Receipt) -> bool:
    """Whether the logs that a surgery made are another run's, with which this one goes on."""
    return "transplant" in receipt.recipe or "of" in (receipt.recipe.get("logs") or {})


def _events(folders: Iterable[Path]) -> list[Path]:
    names = ((folder, name) for folder in folders for name in disk.names_in(folder))
    return [folder / name for folder, name in names if EVENTS in name]


def _trackers(paths: Sequence[Path]) -> list[Path]:
    """The databases of trackers among these."""
    if not paths:
        return []
    from ckptsurgeon.logs.databases.found import is_log as is_tracker

    return list(filter(is_tracker, paths))


def _own(paths: Iterable[Path]) -> list[Path]:
    """Those that are files, each once: a link is left alone."""
    return list(dict.fromkeys(p for p in paths if disk.is_file(p) and not disk.is_link(p)))
