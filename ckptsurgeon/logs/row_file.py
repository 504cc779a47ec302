"""A log that is a table or JSON lines: `metrics.csv` of Lightning's CSVLogger, `metrics.jsonl`."""

from __future__ import annotations

import csv
import io
import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ckptsurgeon import disk
from ckptsurgeon.errors import DamagedFile, UsageError, count, share
from ckptsurgeon.logs import signals, trail
from ckptsurgeon.logs.marks import Marks
from ckptsurgeon.logs.new_names import Counts, namer, noted, two_into_one
from ckptsurgeon.logs.origin import Numbers
from ckptsurgeon.logs.printed.loguru import said
from ckptsurgeon.logs.source import (
    Carry,
    Counted,
    Cut,
    LogSource,
    NewNames,
    Stream,
    Subject,
    keep_in_the_attic,
    leave,
    rewrite,
)
from ckptsurgeon.plans.edits import AnyChange, Content, Piece, Rewrite, Span, relative
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.log_fields import LOGS
from ckptsurgeon.transaction.home import is_rows
from ckptsurgeon.transaction.json_keys import keys_renamed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

END = 256 << 10
"""Bytes at the end of a file in which its last step is looked for."""
CHUNK = 1 << 20
LAYOUTS = 1000
"""Rows of names that are kept in memory."""
UPDATES = "iter"
"""What counts the records of a file where `step` counts two things."""


class RowFile(LogSource):
    """A record is a line; what names no step goes the way of the record before it. The header of a
    table, and records that are not understood, stay."""

    def streams(self) -> list[Stream]:
        steps = ending(self.path, self._counter)
        return [Stream.of(relative(self.path, self.root), self.path.name, steps)]

    def counts_epochs(self) -> bool:
        return self._counter not in (None, UPDATES)

    def counted(self) -> list[Counted]:
        read = _Index(self.path, self._counter)
        known = read.steps != trail.NONE
        points = Numbers(read.steps[known], read.walls[known])
        return [Counted(stream, points) for stream in self.streams()]

    @cached_property
    def _counter(self) -> str | None:
        return counting(self.path)

    def cut(self, cut: Cut) -> tuple[list[AnyChange], list[str]]:
        import numpy as np

        name = relative(self.path, self.root)
        read = _Index(self.path, self._counter)
        points = read.steps != trail.NONE
        if not points.any():
            without = f"{name} stays as it is: nothing in it is known to count steps"
            return [], [without] if len(points) > read.header or read.strange else []
        flags = read.leading_to(cut.marks, name)
        if flags.all():
            return [], []
        stay, total = int((flags & points).sum()), int(points.sum())
        note = f"{share(stay, total, 'row', 'stays', 'stay')}, to step {cut.marks.iteration}"
        time = self.path.stat().st_mtime_ns
        kept = Content(tuple(read.spans(name, flags)), time)
        changes: list[AnyChange] = [Rewrite(name, LOGS, kept, note)]
        if cut.keep_as is not None:
            lost = ~flags | (read.header & (np.arange(len(flags)) == 0))  # a table has its header
            branch = Content(tuple(read.spans(name, lost)), time)
            new = relative(self._branch(cut.keep_as), self.root)
            note = f"the cut branch, {count(total - stay, 'row')}"
            changes.append(Rewrite(new, LOGS, branch, note, new_file=True))
        return changes, []

    def carried(self, carry: Carry) -> tuple[dict[Path, Rewrite | None], list[str]]:
        name = relative(self.path, self.root)
        if not is_rows(name):
            return {}, [
                f"{self.path} is not carried: only ckptsurgeon.yaml says that {name} is a log"
            ]
        read = _Index(self.path, self._counter)
        points = read.steps != trail.NONE
        flags = read.leading_to(carry.marks, name)
        if not (flags & points).any():
            return {}, []
        path = carry.folder(self.path.parent) / self.path.name
        spans = tuple(read.spans(relative(self.path, carry.root), flags))
        content = Content(spans, self.path.stat().st_mtime_ns)
        note = f"{count(int((flags & points).sum()), 'row')}, to step {carry.marks.iteration}"
        return {path: rewrite(path, carry, content, note)}, []

    def _branch(self, name: str) -> Path:
        """Where the cut branch is kept."""
        path = self.path.parent / name / self.path.name
        if disk.exists(path):
            raise UsageError(
                f"{path} exists, so a cut branch can't be kept there",
                next=keep_in_the_attic(path),
            )
        return path

    def rename_keys(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        """The name of what counts steps stays: without it no log is cut."""
        name, used = namer(names.pairs, names.regex)
        counts: dict[tuple[str, str], int] = {}
        seen: dict[str, str] = {}
        file, own = relative(self.path, self.root), self._counter
        pieces = _Pieces(file)
        with self.path.open("rb") as lines:
            for record in _records(lines, own):
                at = signals.step_name(record.item, own)
                new = {key: key if key == at else name(key) for key in record.item}
                seen |= new
                changed = [key for key in new if new[key] != key]
                for key in changed:
                    if not record.header and record.item[key] not in ("", None):
                        counts[key, new[key]] = counts.get((key, new[key]), 0) + 1
                pieces.add(record.line, record.renamed(new) if changed else record.line)
        for old, name_ in seen.items():
            if not name_:
                raise UsageError(
                    f"{self.path}: the new name of {old!r} would be empty", next="give it a name"
                )
        if not names.allow_merge:
            sources: dict[str, str] = {}
            for old, name_ in seen.items():
                if sources.setdefault(name_, old) != old:
                    both = f"{sources[name_]!r} and {old!r} would both be {name_!r}"
                    raise two_into_one(f"{self.path}: {both}")
        unmatched = tuple(key for key in names.pairs if key not in used)
        result = Counts(counts, unmatched, tags=frozenset(seen))
        if not pieces.changed:
            return [], result
        note = noted(sum(counts.values()))
        content = Content(pieces.all(), self.path.stat().st_mtime_ns)
        return [Rewrite(file, LOGS, content, note)], result


def counting(path: Path) -> str | None:
    """The name of what counts epochs, where that alone counts the first records; `iter` where steps
    without one count something else; None where a usual name does."""
    items = list(head(path))
    if any(signals.step_name(each, None) is not None for each in items):
        return UPDATES if _apart(items) else None
    return next((own for each in items if (own := signals.epoch_name(each)) is not None), None)


def _apart(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `step` says what `iter` does, and is alone in other records: MMEngine gives a
    validation the number of its epoch, which is none of updates."""
    steps = [item for item in items if "step" in item]
    both = [item for item in steps if UPDATES in item]
    return 0 < len(both) < len(steps) and all(item["step"] == item[UPDATES] for item in both)


def head(path: Path) -> Iterator[Mapping[str, Any]]:
    """What the first records of a table or of JSON lines say by name; of the header its names."""
    with path.open("rb") as file:
        beginning = file.read(END)
    for each in _records(io.BytesIO(beginning), every=True):
        yield said(each.item)


def ending(path: Path, own: str | None = None) -> list[int]:
    """The steps of its last records, by the name `own` where that is given."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.readline(END)
        start = max(len(head), size - END)
        file.seek(start)
        end = file.read(END)
    if start > len(head):
        end = end.partition(b"\n")[2]
    steps = (
        signals.point(said(each.item), own)[0] for each in _records(io.BytesIO(head + end), own)
    )
    return [step for step in steps if step is not None]


# --- records -------------------------------------------------------------------------------------


@frozen
class _Record:
    """The bytes of one record, and what it says by name; of the header of a table its names."""

    line: bytes
    item: Mapping[str, Any]
    header: bool = False
    table: str = ""
    """What separates the columns, where it is of a table."""

    def renamed(self, new: Mapping[str, str]) -> bytes:
        """The record with these names."""
        if self.table and not self.header:
            return self.line
        if not self.header:
            return keys_renamed(self.line, new)
        text = io.StringIO()
        end = "\r\n" if self.line.endswith(b"\r\n") else "\n"
        csv.writer(text, delimiter=self.table, lineterminator=end).writerow(map(new.get, self.item))
        return text.getvalue().encode()


def _records(file: BinaryIO, own: str | None = None, *, every: bool = False) -> Iterator[_Record]:
    """The records of a table or of JSON lines, in order, and of any other file none. One that is
    not understood says nothing. `own` is the name of what counts, where it is no usual one; a table
    without any is a log only where `every` one is."""
    first = file.readline(CHUNK)
    text = first.decode("utf-8", "replace")
    separator = max(",", "\t", ";", key=text.count)
    if text.lstrip().startswith("{"):
        yield _Record(first, _parsed(first))
        for line in file:
            yield _Record(line, _parsed(line))
        return
    columns = next(csv.reader([text.replace("\0", "")], delimiter=separator), [])
    known = every or own in columns or signals.step_name(columns, None) is not None
    if len(columns) < 2 or not known:
        return
    yield _Record(first, dict.fromkeys(columns), header=True, table=separator)
    taken: list[bytes] = []

    def lines() -> Iterator[str]:
        for line in file:
            taken.append(line)
            yield line.decode("utf-8", "replace").replace("\0", "")

    for row in csv.reader(lines(), delimiter=separator):
        item = dict(zip(columns, row, strict=False))
        yield _Record(b"".join(taken), item, table=separator)
        taken.clear()


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return item if isinstance(item, dict) else {}


def _losses(
    item: Mapping[str, Any], known: dict[tuple[str, ...], frozenset[str]]
) -> frozenset[str]:
    """The names of the losses that a record has; `known` are those of the layouts before it."""
    layout = tuple(item)
    names = known.get(layout)
    if names is None:  # few, as records have the same names
        if len(known) > LAYOUTS:
            known.clear()
        names = known[layout] = trail.losses(layout)
    lacking = [name for name in names if item[name] in ("", None)]
    return names.difference(lacking) if lacking else names


class _Index:
    """Where each record of a file ends, its step and its time; `header` says whether the first one
    names columns, and `strange` whether the file is no table and no JSON lines."""

    def __init__(self, path: Path, own: str | None) -> None:
        import numpy as np

        ends, steps, walls, told = array("Q"), array("q"), array("d"), array("q")
        kinds: dict[frozenset[str], int] = {}
        layouts: dict[tuple[str, ...], frozenset[str]] = {}
        self.header, end = False, 0
        try:
            with path.open("rb") as file:
                for record in _records(file, own):
                    end += len(record.line)
                    self.header |= record.header
                    item, step, wall = said(record.item), None, math.nan
                    if not record.header:
                        step, wall = signals.point(item, own)
                    told.append(kinds.setdefault(_losses(item, layouts), len(kinds)))
                    ends.append(end)
                    steps.append(trail.NONE if step is None else step)
                    walls.append(wall)
        except csv.Error as error:
            raise DamagedFile(str(path), end, str(error), next=leave(path, "lines")) from None
        self.ends = ends
        self.strange = not ends and path.stat().st_size > 0
        self.steps, self.walls = np.array(steps, np.int64), np.array(walls, float)
        self.told = trail.Told(np.array(told, np.int64), [*kinds])

    def leading_to(self, marks: Marks, name: str) -> NDArray[np.bool_]:
        """The records of the history of a step, where the file is called `name`."""
        what = Subject(name, leave(name, "lines"))
        return trail.leading_to(self.steps, self.walls, marks, what, self.told)

    def spans(self, name: str, flags: Any) -> Iterator[Span]:
        """The bytes of the records with a flag."""
        import numpy as np

        edges = np.diff(np.concatenate(([0], flags, [0])).astype(np.int8)).nonzero()[0]
        for first, after in edges.reshape(-1, 2).tolist():
            yield Span(name, self.ends[first - 1] if first else 0, self.ends[after - 1])


# --- new bytes -----------------------------------------------------------------------------------


class _Pieces:
    """The bytes of the file `name` with some of its records anew."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: list[Piece] = []
        self._new = bytearray()
        self._span = (0, 0)
        self.changed = False

    def add(self, old: bytes, new: bytes) -> None:
        """The next record."""
        start, end = self._span
        if new == old:
            self._flush(new=True)
            self._span = start, end + len(old)
            return
        self.changed = True
        self._flush(new=False)
        self._span = end + len(old), end + len(old)
        self._new += new
        if len(self._new) > CHUNK:
            self._flush(new=True)

    def _flush(self, *, new: bool) -> None:
        start, end = self._span
        if new and self._new:
            self._pieces.append(bytes(self._new))
            self._new.clear()
        elif not new and start < end:
            self._pieces.append(Span(self._name, start, end))

    def all(self) -> tuple[Piece, ...]:
        """The whole file."""
        self._flush(new=True)
        self._flush(new=False)
        return tuple(self._pieces)
