"""MLflow's file store (`mlruns/`) as a log of a run."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError, count
from ckptsurgeon.logs import metrics, new_names, tracked
from ckptsurgeon.logs.metrics import SYSTEM
from ckptsurgeon.logs.mlruns import logged_models, parting
from ckptsurgeon.logs.mlruns.metric_file import MetricFile, merged
from ckptsurgeon.logs.mlruns.run_folder import RunFolder, by_line
from ckptsurgeon.logs.new_names import Counts, namer
from ckptsurgeon.logs.source import Cut, NewNames, Stream
from ckptsurgeon.logs.tracked import TrackedRun, TrackedRuns
from ckptsurgeon.plans.edits import AnyChange, Aside, Content, Rewrite, relative
from ckptsurgeon.plans.log_fields import LOGS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

METRIC = re.compile(r"[/\w.\- :]+")
"""What MLflow takes for the name of a metric."""


def found(folders: Sequence[Path], root: Path, named: Sequence[str]) -> list[MLflowFiles]:
    """The stores of these folders of runs; `named` are the runs in them that the user says are
    this run's."""
    stores: dict[Path, list[Path]] = {}
    for folder in folders:
        stores.setdefault(folder.parent.parent, []).append(folder)
    return [MLflowFiles(path, root, own, named) for path, own in stores.items()]


class MLflowFiles(TrackedRuns):
    """The lines of `metrics/`, and of models that were logged with their run their metrics and
    the step at which they are its output. Parameters, tags and artifacts stay; a cut branch has
    the first two as well. All metrics of a run get a new file in its cut, so that an undo brings
    the whole run back, whatever was logged since."""

    def __init__(
        self, path: Path, root: Path, folders: Sequence[Path], named: Sequence[str] = ()
    ) -> None:
        super().__init__(path, root, named)
        self.folders = {folder.name: RunFolder(folder) for folder in folders}

    def streams(self) -> list[Stream]:
        name, run = relative(self.path, self.root), self._newest()
        if run is None:
            return [Stream.of(name, "mlflow", [])]
        steps = self.folders[run.id].steps_at_the("last")
        return [Stream.of(f"{name}: {run.name}", "mlflow", steps)]

    def points(self) -> Iterator[dict[str, float]]:
        run = self._newest()
        if run is not None:
            yield from self.folders[run.id].values()

    def cut(self, cut: Cut) -> tuple[list[AnyChange], list[str]]:
        def first(run: TrackedRun) -> list[int]:
            return self.folders[run.id].steps_at_the("first")

        changes: list[AnyChange] = []
        warnings: list[str] = []
        for run in self._passed(self._runs(whole=True), cut.marks, first):
            folder = self.folders[run.id]
            files, points = folder.points()
            what = self._subject(run)
            stays = metrics.leading_to(points, cut.marks, what)
            if not stays.all():
                parted = parting.Parted(self.root, folder, run, cut, *tracked.branch(run, cut))
                if cut.keep_as is not None and disk.exists(parted.new):
                    raise self._there_is(parted.name)
                changes += parting.parted(parted, files, by_line(points, stays))
                changes += logged_models.parted(parted, files, by_line(points, stays))
                if stays.any() and (number := folder.traces()):
                    warnings.append(
                        f"{what}: its {count(number, 'trace')} stay with it, whenever made"
                    )
            if stays.any() and not self.named:
                break
        return changes, warnings

    def note(self, step: int, text: str, when: float) -> list[AnyChange]:
        """A tag: the description of the run is its user's."""
        run = self._newest()
        if run is None:
            return []
        tag = self.folders[run.id].path / "tags" / f"ckptsurgeon.surgery.{when:.0f}"
        content = Content((f"step {step}: {text}".encode(),))
        new = not disk.exists(tag)
        return [Rewrite(relative(tag, self.root), LOGS, content, f"a note at step {step}", new)]

    def _runs(self, *, whole: bool) -> list[TrackedRun]:
        runs = (folder.as_run(whole=whole) for folder in self.folders.values() if folder.counts())
        return [run for run in runs if run is not None]

    def _newest(self) -> TrackedRun | None:
        return self._newest_of(self._runs(whole=False))

    # --- names -----------------------------------------------------------------------------------

    def rename_keys(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        name, used = namer(names.pairs, names.regex)
        meant = list(self.folders.values())
        if self.named:
            ids = {run.id for run in self._meant(self._runs(whole=False))}
            meant = [folder for folder in meant if folder.id in ids]
        counts: dict[str, int] = {}
        folders: list[dict[str, MetricFile]] = []
        for folder in meant:
            files = folder.files("metrics")
            own = {key: MetricFile(path) for key, path in files.items() if _is_users(key)}
            folders.append(own)
            for key, file in own.items():
                counts[key] = counts.get(key, 0) + len(file)
        new = new_names.each(counts, name, self.path, names.allow_merge)
        changed = {old: to for old, to in new.items() if old != to}
        events = {(old, to): counts[old] for old, to in changed.items()}
        unmatched = tuple(key for key in names.pairs if key not in used)
        result = Counts(events, unmatched, tags=frozenset(counts))
        if not changed:
            return [], result
        ids = {folder.id for folder in meant}
        folders += logged_models.metrics(
            {folder.path.parent for folder in meant}, ids if self.named else None
        )
        note = new_names.noted(sum(events.values()))
        changes = [each for own in folders for each in self._renamed(own, changed, note)]
        return changes, result

    def _renamed(
        self, files: dict[str, MetricFile], changed: dict[str, str], note: str
    ) -> Iterator[AnyChange]:
        """The same of the metrics of one folder. Of a file some lines may not be meant."""
        parts: dict[str, list[tuple[str, MetricFile, NDArray[np.bool_]]]] = {}
        for old, file in files.items():
            own = relative(file.path, self.root)
            to = changed.get(old, old)
            moved = file.own if to != old else ~file.own | file.own
            if moved.any() or to == old:
                parts.setdefault(to, []).append((own, file, moved))
            if not moved.all():
                parts.setdefault(old, []).append((own, file, ~moved))
        base = {old: _below(file.path, old) for old, file in files.items()}
        for to, these in parts.items():
            if len(these) == 1 and these[0][1] is files.get(to) and these[0][2].all():
                continue
            place = next(iter(base.values())) / to
            self._refuse_place(to, place, {*files, *parts})
            times = [file.path.stat().st_mtime_ns for _, file, _ in these]
            content = Content(tuple(merged(these)), max(times))
            there = to in files
            yield Rewrite(relative(place, self.root), LOGS, content, note, new_file=not there)
        for old, file in files.items():
            if old not in parts:
                yield Aside(relative(file.path, self.root), LOGS)

    def _refuse_place(self, to: str, place: Path, beside: set[str]) -> None:
        """Raise UsageError for a name that MLflow has no file for."""
        written = METRIC.fullmatch(to) and posixpath.normpath(to) == to
        if not written or to.startswith(("/", "..")) or to == ".":
            raise UsageError(
                f"{self.path}: MLflow has no file for a metric {to!r}",
                next="letters, digits, _ - . / : and spaces are allowed",
            )
        above = [str(part) for part in Path(to).parents if str(part) in beside]
        if above or disk.is_folder(place):
            other = above[0] if above else f"{to}/…"
            raise UsageError(
                f"{self.path}: a metric {to!r} can't be beside {other!r}: one would be a file and "
                "the other a folder of one name",
                next="give it another name",
            )


def _is_users(key: str) -> bool:
    return not key.startswith(SYSTEM)


def _below(path: Path, key: str) -> Path:
    """The folder in which a metric has its name."""
    return path.parents[len(Path(key).parts) - 1]
