"""An offline run of W&B, of which each start of the trainer wrote a file, as a log of a run."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import again
from ckptsurgeon.logs import rows, trail
from ckptsurgeon.logs.new_names import Counts, namer, two_into_one
from ckptsurgeon.logs.source import Cut, LogSource, NewNames, Stream
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


def found(files: Sequence[Path], root: Path) -> list[OfflineRun]:
    """The runs of these files: those of one folder with one id follow one another by name, which
    begins with the time."""
    runs: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(files):
        match = NAME.fullmatch(path.name)
        if match:
            runs.setdefault((path.parent.parent, match["id"]), []).append(path)
    return [OfflineRun(paths, root, id) for (_, id), paths in runs.items()]


class OfflineRun(LogSource):
    """History that is not of a step's leaves, and the summaries that it made; system metrics leave
    by their time, and all else stays: the config, definitions, what was printed."""

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

    def cut(self, cut: Cut) -> tuple[list[AnyChange], list[str]]:
        import numpy as np

        logs = [_Log(path) for path in self.paths]
        names = [name for log in logs for name in log.names]
        key = rows.step_name(dict.fromkeys(names), None)
        if key is None:
            return [], []
        steps = np.concatenate([log.steps(key) for log in logs])
        walls = np.concatenate([log.column("_timestamp") for log in logs])
        flags = trail.leading_to(steps, walls, cut.marks, relative(self.path, self.root))
        borders = np.cumsum([0, *(log.points for log in logs)])
        changes: list[AnyChange] = []
        warnings: list[str] = []
        kept_step = -1
        for log, first, end in zip(logs, borders[:-1], borders[1:], strict=True):
            own = flags[first:end]
            kept = log.column(OWN)[own]
            kept_step = max([kept_step, *(int(step) for step in kept[np.isfinite(kept)])])
            if own.all():
                continue
            if log.path.with_name(log.path.name + SYNCED).exists():
                warnings.append(self._synced(log.path, kept_step))
                continue
            changes += self._changes(log, own, cut)
        return changes, warnings

    def _changes(self, log: _Log, flags: NDArray[np.bool_], cut: Cut) -> list[AnyChange]:
        """The new file, or that it leaves, and what keeps the cut branch."""
        file = relative(log.path, self.root)
        stay, total = int(flags.sum()), log.points
        time = log.path.stat().st_mtime_ns
        kept, lost = framing.Framed(file), framing.Framed(file)
        for item, stays, common in log.sides(flags):
            if stays:
                kept.copy(item)
            if not stays or common:
                is_run = cut.keep_as is not None and record.said(item.data).kind == RUN
                if is_run:
                    lost.write(record.with_id(item.data, f"{self.id}-{cut.keep_as}"))
                else:
                    lost.copy(item)
        note = f"{stay} of {total} points stay, to step {cut.marks.iteration}"
        changes: list[AnyChange] = [Aside(file, LOGS)]
        if stay:
            changes = [Rewrite(file, LOGS, Content(kept.pieces, time), note)]
        if cut.keep_as is not None:
            branch = Content(lost.pieces, time)
            new = relative(self._branch(log.path, cut.keep_as), self.root)
            note = f"the cut branch, {total - stay} points"
            changes.append(Rewrite(new, LOGS, branch, note, new_file=True))
        return changes

    def _branch(self, path: Path, name: str) -> Path:
        """Where the cut branch is kept: as an offline run of its own, which W&B can upload."""
        folder = path.parent.with_name(f"{path.parent.name}-{name}")
        if folder.exists():
            raise UsageError(
                f"{folder} exists, so a cut branch can't be kept there",
                next=again("--no-keep-tb", why="keeps it in the attic alone"),
            )
        return folder / f"run-{self.id}-{name}.wandb"

    def _synced(self, path: Path, step: int) -> str:
        return (
            f"{relative(path, self.root)} stays as it is: a server has it. Start the trainer with "
            f'wandb.init(fork_from="{self.id}?_step={step}"), or with resume_from to go on in the '
            "same run"
        )

    def rename(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        name, used = namer(names.pairs, names.regex)
        counts: dict[tuple[str, str], int] = {}
        seen: dict[str, str] = {}
        changes: list[AnyChange] = []
        warnings: tuple[str, ...] = ()
        for path in self.paths:
            log = _Log(path)
            key = rows.step_name(log.names, None)
            new = {
                old: old if old == key or old.startswith("_") else name(old) for old in log.names
            }
            seen |= new
            if all(old == new_name for old, new_name in new.items()):
                continue
            if path.with_name(path.name + SYNCED).exists():
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
            note = f"{sum(counts.values())} numbers get new names"
            changes.append(Rewrite(file, LOGS, content, note))
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
    """The points of one file, in columns, and what else in it is cut with them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points = 0
        self.names: dict[str, None] = {}
        self._columns: dict[str, array[float]] = {}
        for item in framing.records(framing.opened(path), path):
            said = record.said(item.data)
            if said.kind != HISTORY:
                continue
            for name, value in said.values.items():
                self.names[name] = None
                if name in (OWN, "_timestamp") or rows.step_name([name], None):
                    column = self._columns.setdefault(name, array("d"))
                    column.extend([math.nan] * (self.points - len(column)))
                    column.append(value)
            self.points += 1

    def column(self, name: str) -> NDArray[np.float64]:
        """The numbers of one name, NaN where a point has none."""
        import numpy as np

        column = np.full(self.points, np.nan)
        values = self._columns.get(name, array("d"))
        column[: len(values)] = values
        return column

    def steps(self, name: str) -> NDArray[np.int64]:
        """The same as steps."""
        import numpy as np

        column = self.column(name)
        known = np.isfinite(column) & (column >= 0) & (column < 1 << 60)
        return np.where(known, column, trail.NONE).astype(np.int64)

    def sides(self, flags: NDArray[np.bool_]) -> Any:
        """Each record, whether it stays, and whether both sides have it: all that is no history, no
        summary and no system metrics. A summary goes with the point whose own step it has, else
        with the point before it; system metrics go that are later than the last point that
        stays."""
        import numpy as np

        own, walls = self.column(OWN), self.column("_timestamp")
        gone = set(own[~flags].tolist())
        times = walls[flags]
        last = float(np.nanmax(times)) if np.isfinite(times).any() else math.inf
        point, stays = 0, True
        for item in framing.records(framing.opened(self.path), self.path):
            said = record.said(item.data)
            if said.kind == HISTORY:
                stays = bool(flags[point])
                point += 1
                yield item, stays, False
            elif said.kind == SUMMARY:
                step = said.values.get(OWN)
                yield item, (stays if step is None else step not in gone), False
            elif said.kind == STATS:
                yield item, not said.time > last, False
            else:
                yield item, True, True


def _counting(points: Sequence[dict[str, float]]) -> str:
    """The name that counts updates in these points."""
    names = {name: None for values in points for name in values}
    return rows.step_name(names, None) or OWN
