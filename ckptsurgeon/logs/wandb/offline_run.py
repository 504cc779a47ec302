"""A run of W&B, of which each start of the trainer wrote a file, as a log of a run."""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError, count, share
from ckptsurgeon.logs import signals, trail
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.new_names import Counts, namer, noted, two_into_one
from ckptsurgeon.logs.source import (
    Carry,
    Cut,
    LogSource,
    NewNames,
    Stream,
    Subject,
    keep_in_the_attic,
    leave,
    rewrite,
)
from ckptsurgeon.logs.wandb import framing, record
from ckptsurgeon.logs.wandb.record import HISTORY, METRIC, RUN, STATS, SUMMARY
from ckptsurgeon.plans.edits import AnyChange, Aside, Content, Rewrite, relative
from ckptsurgeon.plans.log_fields import LOGS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME = re.compile(r"run-(?P<id>.+)\.wandb")
SYNCED = ".synced"
"""What W&B puts behind the name of a file whose records a server has."""
END = 256 << 10
"""Bytes at the end of a file in which its last step is looked for."""
OWN = "_step"
"""What W&B counts itself."""
OFFLINE = "offline-run-"
"""How the folder of a start is called that sent nothing; of any other it is `run-`."""
WALL = "_timestamp"
LAYOUTS = 1000
"""Rows of names that are kept in memory."""
ID, FORK, RESUME = "WANDB_RUN_ID", "WANDB_FORK_FROM", "WANDB_RESUME_FROM"
"""Variables by which a trainer's next start goes on from a point of a run that a server has."""


def found(files: Sequence[Path], root: Path) -> list[OfflineRun]:
    """The runs of these files: those of one folder with one id follow one another by name, which
    begins with the time."""
    runs: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(files, key=lambda path: str(path).replace(f"/{OFFLINE}", "/run-")):
        match = NAME.fullmatch(path.name)
        if match:
            runs.setdefault((path.parent.parent, match["id"]), []).append(path)
    return [OfflineRun(paths, root, id) for (_, id), paths in runs.items()]


class OfflineRun(LogSource):
    """History that is not of a step's leaves, and the summaries that it made; system metrics leave
    by their time, and all else stays: the config, definitions, what was printed. A file whose
    records a server has is left alone: people look there."""

    def __init__(self, paths: Sequence[Path], root: Path, id: str) -> None:
        super().__init__(paths[-1], root)
        self.paths, self.id = paths, id

    def streams(self) -> list[Stream]:
        steps: list[int] = []
        for path in reversed(self.paths):
            data = framing.opened(path)
            start = len(framing.START)
            if len(data) > END:
                start = framing.first_after(data, len(data) - END)
            found = [record.said(item.data) for item in framing.records(data, path, start)]
            points = [item.values for item in found if item.kind == HISTORY]
            key = _counting(points)
            steps = [int(values[key]) for values in points if key in values]
            if steps:
                break
        return [Stream.of(relative(self.path, self.root), "wandb", steps)]

    def points(self) -> Iterator[dict[str, float]]:
        """The numbers of each point by name, in the order in which they were logged."""
        for path in self.paths:
            for item in framing.records(framing.opened(path), path):
                if record.kind(item.data) == HISTORY:
                    yield record.said(item.data).values

    def cut(self, cut: Cut) -> tuple[list[AnyChange], list[str]]:
        changes: list[AnyChange] = []
        warnings: list[str] = []
        for log, own, step in self._parted(cut.marks):
            if own.all():
                continue
            if _on_server(log.path):
                warnings.append(self._synced(log.path, step))
                continue
            changes += self._changes(log, own, cut)
        return changes, list(dict.fromkeys(warnings))

    def goes_on_from(self, marks: Marks) -> int | None:
        """W&B's own step of the last point that leads to `marks`, where a server has later ones."""
        parted = self._parted(marks)
        later = any(not own.all() for log, own, _ in parted if _on_server(log.path))
        return parted[-1][2] if later else None

    def _parted(self, marks: Marks) -> list[tuple[_Log, NDArray[np.bool_], int]]:
        """Each file, which of its points lead to `marks`, and W&B's own step of the last one that
        does of all up to it; none where nothing counts steps."""
        import numpy as np

        logs = [_Log(path) for path in self.paths]
        names = [name for log in logs for name in log.names]
        key = signals.step_name(dict.fromkeys(names), None)
        if key is None:
            return []
        steps = np.concatenate([log.steps(key) for log in logs])
        walls = np.concatenate([log.column(WALL) for log in logs])
        folders = relative(self.path.parent.with_name(f"*-{self.id}"), self.root)
        what = Subject(relative(self.path, self.root), leave(folders, "records"))
        told = trail.Told.joined([log.told for log in logs])
        flags = trail.leading_to(steps, walls, marks, what, told)
        borders = np.cumsum([0, *(log.points for log in logs)])
        parted = []
        last = -1
        for log, first, end in zip(logs, borders[:-1], borders[1:], strict=True):
            own = flags[first:end]
            kept = log.column(OWN)[own]
            last = max([last, *(int(step) for step in kept[np.isfinite(kept)])])
            parted.append((log, own, last))
        return parted

    def _changes(self, log: _Log, flags: NDArray[np.bool_], cut: Cut) -> list[AnyChange]:
        """The new file, or that it leaves, and what keeps the cut branch."""
        file = relative(log.path, self.root)
        stay, total = int(flags.sum()), log.points
        time = log.path.stat().st_mtime_ns
        stays, common = log.sides(flags)
        kept = log.framed(file, stays, "")
        note = f"{share(stay, total, 'point', 'stays', 'stay')}, to step {cut.marks.iteration}"
        changes: list[AnyChange] = [Aside(file, LOGS)]
        if stay:
            changes = [Rewrite(file, LOGS, Content(kept.pieces, time), note)]
        if cut.keep_as is not None:
            lost = log.framed(file, ~stays | common, f"{self.id}-{cut.keep_as}")
            branch = Content(lost.pieces, time)
            new = relative(self._branch(log.path, cut.keep_as), self.root)
            note = f"the cut branch, {count(total - stay, 'point')}"
            changes.append(Rewrite(new, LOGS, branch, note, new_file=True))
        return changes

    def carried(self, carry: Carry) -> tuple[dict[Path, Rewrite | None], list[str]]:
        """As offline runs of an id of its own: under the old one an upload would mix both."""
        id = f"{self.id}-{re.sub(r'[^a-zA-Z0-9_-]', '-', carry.name)}"
        made: dict[Path, Rewrite | None] = {}
        warnings: list[str] = []
        for log, own, step in self._parted(carry.marks):
            if _on_server(log.path):
                warnings.append(self._synced(log.path, step))
                continue
            if not own.any():
                continue
            folder = log.path.parent
            place = carry.folder(folder.parent) / f"{folder.name.removesuffix(f'-{self.id}')}-{id}"
            path = place / f"run-{id}.wandb"
            framed = log.framed(relative(log.path, carry.root), log.sides(own)[0], id)
            content = Content(framed.pieces, log.path.stat().st_mtime_ns)
            note = f"{count(int(own.sum()), 'point')}, to step {carry.marks.iteration}"
            made[path] = rewrite(path, carry, content, note)
        if made:
            warnings.append(
                f'what {self.id} logged to W&B is carried as the run {id}: {ID}="{id}" and '
                'WANDB_RESUME="allow" go on in it'
            )
        return made, list(dict.fromkeys(warnings))

    def _branch(self, path: Path, name: str) -> Path:
        """Where the cut branch is kept: as an offline run of its own, which W&B can upload."""
        folder = path.parent.with_name(f"{path.parent.name}-{name}")
        if disk.exists(folder):
            raise UsageError(
                f"{folder} exists, so a cut branch can't be kept there",
                next=keep_in_the_attic(folder),
            )
        return folder / f"run-{self.id}-{name}.wandb"

    def _synced(self, path: Path, step: int) -> str:
        if step < 0:
            return f"{relative(path, self.root)} stays as it is: a server has it"
        at = f"{self.id}?_step={step}"
        return (
            f"{relative(path, self.root)} stays as it is: a server has it. Let the next start fork "
            f'it with wandb.init(fork_from="{at}"), or {FORK}="{at}", which W&B reads itself; or '
            f'go on in the same run with wandb.init(id="{self.id}", resume_from="{at}"), or '
            f'{ID}="{self.id}" {RESUME}="{at}"'
        )

    def rename_keys(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        name, used = namer(names.pairs, names.regex)
        counts: dict[tuple[str, str], int] = {}
        seen: dict[str, str] = {}
        changes: list[AnyChange] = []
        warnings: tuple[str, ...] = ()
        for path in self.paths:
            log = _Log(path)
            key = signals.step_name(log.names, None)
            new = {
                old: old if old == key or old.startswith("_") else name(old) for old in log.names
            }
            seen |= new
            if all(old == new_name for old, new_name in new.items()):
                continue
            if _on_server(path):
                warnings += (f"{relative(path, self.root)} stays as it is: a server has it",)
                continue
            file = relative(path, self.root)
            framed = framing.Framed(file)
            for item in framing.records(framing.opened(path), path):
                said = record.said(item.data)
                if said.kind not in (HISTORY, SUMMARY, METRIC):
                    framed.copy(item)
                    continue
                data = record.renamed(item.data, new)
                framed.copy(item) if data == item.data else framed.write(data)
                for old in said.values if said.kind == HISTORY else ():
                    if new.get(old, old) != old:
                        counts[old, new[old]] = counts.get((old, new[old]), 0) + 1
            content = Content(framed.pieces, path.stat().st_mtime_ns)
            changes.append(Rewrite(file, LOGS, content, noted(sum(counts.values()))))
        sources: dict[str, str] = {}
        for old, new_name in seen.items():
            if not new_name:
                raise UsageError(
                    f"{self.path}: the new name of {old!r} would be empty", next="give it a name"
                )
            if sources.setdefault(new_name, old) != old and not names.allow_merge:
                both = f"{sources[new_name]!r} and {old!r} would both be {new_name!r}"
                raise two_into_one(f"{self.path}: {both}")
        unmatched = tuple(key for key in names.pairs if key not in used)
        return changes, Counts(counts, unmatched, warnings, frozenset(seen))


class _Log:
    """The points of one file, in columns, and where its records are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points = 0
        self._data = framing.opened(path)
        self._starts, self._ends = array("Q"), array("Q")
        self._kinds, self._numbers = array("B"), array("d")
        self._columns: dict[bytes, array[float]] = {}
        self._known: dict[bytes, bool] = {}
        self._told, self._losses = array("q"), dict[frozenset[str], int]()
        layouts: dict[tuple[tuple[bytes, ...], ...], tuple[list[tuple[int, bytes]], int]] = {}
        for item in framing.records(self._data, path):
            kind, number = record.kind(item.data), math.nan
            if kind == HISTORY:
                sizes, found, texts = record.numbers(item.data)
                layout = (sizes, found)
                if layout not in layouts:  # few, as points have the same names
                    layouts[layout] = self._wanted(sizes, found)
                wanted, losses = layouts[layout]
                self._told.append(losses)
                for at, name in wanted:
                    column = self._columns.setdefault(name, array("d"))
                    column.extend([math.nan] * (self.points - len(column)))
                    column.append(record.number(texts[at]))
                if len(layouts) > LAYOUTS:
                    layouts.clear()
                self.points += 1
            elif kind == SUMMARY:
                number = record.own_step(item.data)
            elif kind == STATS:
                number = record.said(item.data).time
            self._starts.append(item.start)
            self._ends.append(item.end)
            self._kinds.append(kind if kind in (HISTORY, SUMMARY, STATS, RUN) else 0)
            self._numbers.append(number)
        self.names = {name.decode(): None for name in self._known}

    def _wanted(
        self, sizes: Sequence[bytes], names: Sequence[bytes]
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Which of these names count steps, or tell the time; and which losses there are."""
        places: dict[bytes, int] = {}  # of two of one name the last counts
        for at, (size, name) in enumerate(zip(sizes, names, strict=True)):
            if size[0] == len(name):
                places[name] = at
        for name in places:
            if name not in self._known:
                own = name in (OWN.encode(), WALL.encode())
                self._known[name] = own or counts_steps(name)
        wanted = [(at, name) for name, at in places.items() if self._known[name]]
        losses = trail.losses(name.decode() for name in places)
        return wanted, self._losses.setdefault(losses, len(self._losses))

    @property
    def told(self) -> trail.Told:
        """Which losses each point has."""
        import numpy as np

        return trail.Told(np.array(self._told, np.int64), [*self._losses])

    def column(self, name: str) -> NDArray[np.float64]:
        """The numbers of one name, NaN where a point has none."""
        import numpy as np

        column = np.full(self.points, np.nan)
        values = self._columns.get(name.encode(), array("d"))
        column[: len(values)] = values
        return column

    def steps(self, name: str) -> NDArray[np.int64]:
        """The same as steps."""
        import numpy as np

        column = self.column(name)
        known = np.isfinite(column) & (column >= 0) & (column < 1 << 60)
        return np.where(known, column, trail.NONE).astype(np.int64)

    def sides(self, flags: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of each record, whether it stays, and whether both sides have it: all that is no history,
        no summary and no system metrics. A summary goes with the point whose own step it has, else
        with the point before it; system metrics go that are later than the last point that
        stays."""
        import numpy as np

        kinds, numbers = np.array(self._kinds), np.array(self._numbers)
        walls = self.column(WALL)[flags]
        last = float(np.nanmax(walls)) if np.isfinite(walls).any() else math.inf
        stays = np.ones(len(kinds), bool)
        stays[kinds == HISTORY] = flags
        before = np.cumsum(kinds == HISTORY) - 1
        own = self.column(OWN)[~flags]
        summaries = kinds == SUMMARY
        stays[summaries] = np.where(
            np.isfinite(numbers[summaries]),
            ~np.isin(numbers[summaries], own),
            (before[summaries] < 0) | flags[np.maximum(before[summaries], 0)],
        )
        metrics = kinds == STATS
        stays[metrics] = ~(numbers[metrics] > last)
        return stays, ~np.isin(kinds, (HISTORY, SUMMARY, STATS))

    def framed(self, file: str, flags: NDArray[np.bool_], id: str) -> framing.Framed:
        """The records with a flag as a file of their own; with `id`, of the run of that id."""
        import numpy as np

        framed = framing.Framed(file)
        edges = np.diff(np.concatenate(([0], flags, [0])).astype(np.int8)).nonzero()[0]
        runs = [i for i, kind in enumerate(self._kinds) if kind == RUN and id]
        for first, after in edges.reshape(-1, 2).tolist():
            at = first
            while at < after:
                k = bisect_left(runs, at)
                end = min(runs[k], after) if k < len(runs) else after
                if end > at and framed.stretch(self._starts[at], self._ends[end - 1]):
                    at = end
                    continue
                row = min(bisect_right(self._ends, framed.reach(self._starts[at]), at), end)
                if row > at:
                    framed.row(self._starts[at], self._ends[row - 1])
                    at = row
                    continue
                item = framing.record_at(self._data, self._starts[at], self._ends[at])
                if end == at:
                    framed.write(record.with_id(item.data, id))
                else:
                    framed.copy(item)
                at += 1
        return framed


def _on_server(path: Path) -> bool:
    """Whether the records of a file were uploaded: by `wandb sync`, or while they were logged."""
    uploaded = disk.exists(path.with_name(path.name + SYNCED))
    return uploaded or not path.parent.name.startswith(OFFLINE)


def counts_steps(name: bytes) -> bool:
    """Whether a name may be that of what counts updates."""
    return signals.step_name([name.decode()], None) is not None


def _counting(points: Sequence[dict[str, float]]) -> str:
    """The name that counts updates in these points."""
    names = {name: None for values in points for name in values}
    return signals.step_name(names, None) or OWN
