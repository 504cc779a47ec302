"""Curves of a file that is no event file: a table, JSON lines, `trainer_state.json`, printed lines.

Which name is the loss is decided once for a file, by what most of its rows have.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from ckptsurgeon import whole_file
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import Hint, again
from ckptsurgeon.logs import signals
from ckptsurgeon.logs.curves import Curves, Row, of_rows
from ckptsurgeon.logs.printed.families import every
from ckptsurgeon.logs.printed.loguru import said
from ckptsurgeon.logs.printed.pairs import counted, entry, first_count, pairs
from ckptsurgeon.logs.printed.points import MAX_DOCUMENT
from ckptsurgeon.logs.printed.stated import LoggedUpdate

SAID = {
    "loss": signals.LOSS, "grad_norm": signals.GRAD_NORM, "loss_scale": signals.LOSS_SCALE,
    "consumed_samples": signals.SAMPLES, "batch_size": signals.BATCH_SIZE,
}  # fmt: skip
MAX_LINE = 1 << 20
SHOWN = 12
"""Names of a file that are listed where none of them is known."""


class Unclear(UsageError):
    """What is the loss in a log, or counts its steps, is not known. `names` are those it has."""

    names: tuple[str, ...] = ()

    def having(self, names: Iterable[str]) -> Unclear:
        """The same, with the names."""
        self.names = tuple(names)
        return self


def of_file(path: Path, own: Mapping[str, str], step: str | None = None) -> Curves:
    """The curves in one file, by its first line: a table with a column of steps, an object a line,
    a `trainer_state.json`, or lines that a trainer printed. `own` names what signals are called in
    it, `step` what counts updates.

    Raises UsageError for a file that can't be read, or that has neither a loss nor a gradient norm
    under a name that is known."""
    with (
        _readable(path),
        path.open(encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        rows, notes = _read(path, file, own, step)
    return replace(of_rows(rows, path), notes=notes)


def of_points(path: Path, points: Iterable[Mapping[str, float]], own: Mapping[str, str]) -> Curves:
    """The curves of points that are read already, in the order in which they were written."""
    return of_rows(_known(path, points, own, None), path)


def of_history(starts: Sequence[Path], own: Mapping[str, str]) -> Curves:
    """The same, of files that nobody named and that lie in a run, as `joined`: nothing waits for
    them, and each has at most `MAX_DOCUMENT` bytes. Raises UsageError for the last of them."""
    notes: list[str] = []

    def read(path: Path) -> list[Row]:
        with _readable(path):
            text = _text(whole_file.read(path, MAX_DOCUMENT))
            rows, unread = _read(path, text, own, None)
        notes.extend(unread)
        return rows

    return replace(of_rows(joined(starts, read), starts[-1]), notes=tuple(notes))


def joined(starts: Sequence[Path], read: Callable[[Path], list[Row]]) -> list[Row]:
    """The rows of files that a trainer began one at each start, in order, from the last one that
    began the training anew on. Of those before the last one only what can be read."""
    rows = read(starts[-1])
    for path in reversed(starts[:-1]):
        with contextlib.suppress(UsageError):
            older = read(path)
            if not rows or not older or older[0][0] >= rows[0][0]:
                break
            rows = [*older, *rows]
    return rows


def at_the_end(path: Path, most: int) -> tuple[list[Row], bool]:
    """The rows in the last `most` bytes of a file, in the order of the file, and whether these are
    all: of a table or of lines. A longer document of JSON gives none, as it has no last lines.

    Raises UsageError as `of_file` does; nothing waits for a file."""
    with _readable(path), whole_file.regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most and path.suffix == ".json":
            return [], False
        end, named = os.pread(descriptor, most, max(0, size - most)), b""
        if size > most:
            end = end[_line(end[:MAX_LINE]) :]
            head = os.pread(descriptor, MAX_LINE, 0)
            named = b"" if head.startswith(b"{") else head[: _line(head)]
        return _read(path, _text(named + end), {}, None)[0], size <= most


def _line(data: bytes) -> int:
    """Bytes of its first line."""
    return data.find(b"\n") + 1 or len(data)


def _text(data: bytes) -> TextIO:
    return io.StringIO(data.decode("utf-8", "backslashreplace"), newline="")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises UsageError for a file that can't be read."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}", next="--log FILE that the trainer wrote"
        ) from None
    except csv.Error as error:
        raise UsageError(f"{path}: {error}", next="--log FILE that the trainer wrote") from None


def _read(
    path: Path, file: TextIO, own: Mapping[str, str], step: str | None
) -> tuple[list[Row], tuple[str, ...]]:
    """The rows in the text of a file, and sentences on what could not be read."""
    first = file.readline(MAX_DOCUMENT)
    if not first:
        raise UsageError(f"{path} is empty", next="--log FILE that the trainer wrote")
    second = file.readline(MAX_DOCUMENT)
    lines: Iterable[str] = chain([first, second], file)
    separator = max(",", "\t", ";", key=first.count)
    columns = next(csv.reader([first.replace("\0", "")], delimiter=separator), [])
    below = second.split(separator)
    counts = signals.step_name(columns, step) is not None
    if len(columns) > 1 and (counts or _is_header(columns, below)):
        clean = (line.replace("\0", "") for line in lines)
        table = csv.DictReader(clean, delimiter=separator)
        return _known(path, table, own, step, columns), ()
    whole = _object(first)
    if path.suffix == ".json" and (whole is None or "log_history" in whole):
        return _known(
            path, _document(path, first + second + file.read(MAX_DOCUMENT)), own, step
        ), ()
    if whole is not None:
        objects = (item for line in lines if (item := _object(line)) is not None)
        try:
            return _known(path, objects, own, step), ()
        except UsageError:
            file.seek(0)  # the bundled trainer's promise is an object above printed lines
            rows = _printed(path, file, own, step)
            if rows is None:
                raise
            return rows, ()
    rows = _printed(path, lines, own, step)
    if rows is None:
        file.seek(0)
        return _counted(path, file, own, step)
    return rows, ()


def _is_header(columns: Sequence[str], below: Sequence[str]) -> bool:
    """Whether a first line is that of a table: names alone, one of them with a loss, or each above
    a cell of the row below, two of which are numbers or more."""
    names = [name.strip() for name in columns]
    cells = sum(signals.number(cell.strip().strip('"')) is not None for cell in below)
    return (
        all(name and signals.number(name) is None and len(name) < 200 for name in names)
        and not names[0].startswith("{")
        and (
            any("loss" in name.lower() for name in names)
            or (len(below) == len(names) and cells > 1)
        )
        and not any(re.search(r"(?i)loss\W+(?:[\d.]|nan|inf)", name) for name in names)
    )


# --- records -------------------------------------------------------------------------------------


def _known(
    path: Path,
    items: Iterable[Any],
    own: Mapping[str, str],
    step: str | None,
    columns: Sequence[str] = (),
) -> list[Row]:
    """The rows of records whose names are known: those of a table, objects, the pairs of a line."""
    at = signals.step_name(columns, step)
    counts = {name: 0 for name in columns if name and name != at}
    records: list[tuple[Mapping[str, Any], int | None]] = []
    for item in items:
        if not isinstance(item, Mapping):
            continue
        numbers = {
            k: v for k, v in item.items() if isinstance(k, str) and signals.number(v) is not None
        }
        at = signals.step_name(numbers, step)
        for name in numbers:
            if name != at:
                counts[name] = counts.get(name, 0) + 1
        count = None if at is None else signals.number(numbers[at])
        whole = count is not None and math.isfinite(count) and 0 <= count < 1 << 60
        records.append((item, int(count) if count is not None and whole else None))
    named = signals.commonest(counts, own)
    if not {signals.LOSS, signals.GRAD_NORM} & {name for name, found in named.items() if found}:
        raise _unknown(path, counts, own)
    if len(alike := named.get(signals.LOSS, [])) > 1:
        raise Unclear(
            f"{path} has several columns that may be the loss: {_listed(alike)}",
            next=[again("--tag", f"loss={name}") for name in alike[:3]],
        ).having(alike)
    rows = list(_rows(records, {name: found[0] for name, found in named.items() if found}))
    if (not rows and any(at is not None for _, at in records)) or not records:
        raise UsageError(
            f"{path}: no row of it has a step and a loss", next="--log FILE that the trainer wrote"
        )
    if not rows:
        raise Unclear(
            f"{path}: nothing in it is known to count steps; it has {_listed(counts)}",
            next=again("--step", "NAME", why="which of these counts updates"),
        ).having(counts)
    return rows


def _rows(
    records: Iterable[tuple[Mapping[str, Any], int | None]], named: Mapping[str, str]
) -> Iterator[Row]:
    """Those that have a step and a number of a signal."""
    for item, step in records:
        values = {signal: signals.number(item.get(name)) for signal, name in named.items()}
        numbers = {signal: value for signal, value in values.items() if value is not None}
        if step is not None and numbers:
            times = (signals.number(item.get(name)) for name in signals.TIMES)
            when = next((value for value in times if value is not None), math.nan)
            yield step, numbers, when


def _unknown(path: Path, counts: Mapping[str, int], own: Mapping[str, str]) -> UsageError:
    """What to say where no loss is known: what there is, and the likeliest option."""
    likely = [name for name in counts if "loss" in name.lower()] or list(counts)
    hints: list[Hint] = [again("--tag", f"loss={name}") for name in likely[:3]]
    if missing := [name for signal, name in own.items() if name not in counts]:
        return UsageError(
            f"{path} has no {missing[0]!r}; it has {_listed(counts)}",
            next=[again(swapped=(f"loss={missing[0]}", f"loss={name}")) for name in likely[:3]]
            or ["--log FILE that the trainer wrote"],
        )
    seen = f"; it has {_listed(counts)}" if counts else ", and no number with a name"
    return Unclear(
        f"{path}: no loss is known in it{seen}", next=hints or ["--log FILE that the trainer wrote"]
    ).having(counts)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:SHOWN]) + (f" … ({len(every)})" if len(every) > SHOWN else "")


def _document(path: Path, text: str) -> list[Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    history = document.get("log_history") if isinstance(document, dict) else document
    if not isinstance(history, list):
        raise UsageError(
            f"{path} has no log_history", next="--log FILE: a trainer_state.json, CSV or JSON lines"
        )
    return history


def _object(line: str) -> dict[str, Any] | None:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return {**said(item)} if isinstance(item, dict) else None


# --- printed lines -------------------------------------------------------------------------------


def _printed(
    path: Path, lines: Iterable[str], own: Mapping[str, str], step: str | None
) -> list[Row] | None:
    """By the form of the lines, where a trainer is known by it; else by their names and numbers.
    None where no line names a step."""
    speakers = [] if own or step is not None else every()
    rows: list[Row] = []
    records: list[Mapping[str, float]] = []
    by_epochs: dict[str, list[LoggedUpdate]] = {s.name: [] for s in speakers if s.numbered}
    begun: LoggedUpdate | None = None
    for line in lines:
        statement = next((s for item in speakers if (s := item.read(line)) is not None), None)
        if statement is None or _mute(statement):
            found = {} if rows else _named(line, step)
            if signals.step_name(found, step) is not None and len(found) > 1:
                records.append(found)
            continue
        if statement.family in by_epochs:
            by_epochs[statement.family].append(statement)
            continue
        if statement.continues:
            begun = None if begun is None else begun.joined(statement)
            continue
        rows += [] if begun is None else _said(begun)
        begun = statement
    rows += [] if begun is None else _said(begun)
    if not rows:
        told = (s.numbered(by_epochs[s.name]) for s in speakers if s.numbered)
        rows = [row for each in chain.from_iterable(told) for row in _said(each)]
    if rows:
        return rows
    return _known(path, records, own, step) if records else None


def _named(line: str, step: str | None) -> dict[str, float]:
    """The numbers of a line by their names. Where none of them counts updates, and nobody has said
    which does, the step is what the line counts before its first word."""
    found = pairs(line)
    if step is None and signals.step_name(found, None) is None:
        count = first_count(line)
        found |= {} if count is None else {"step": count}
    return found


def _counted(
    path: Path, lines: Iterable[str], own: Mapping[str, str], step: str | None
) -> tuple[list[Row], tuple[str, ...]]:
    """Dicts that name no step: by the progress bar before them, or by their own count."""
    records: list[Mapping[str, object]] = []
    bar: int | None = None
    for line in lines:
        bar = bar if (now := counted(line)) is None else now
        found = entry(line)
        if found is not None and step is None and signals.step_name(map(str, found), None) is None:
            found = {**found, "step": len(records) + 1 if bar is None else bar}
        records += [] if found is None else [found]
    if not records:
        raise UsageError(
            f"{path}: no line of it is understood: none has a step and a number with a name",
            next="--log FILE that the trainer wrote",
        )
    named = bar is not None or step is not None
    notes = () if named else ("its lines name no step: a step is a line here",)
    return _known(path, records, own, step), notes


def _mute(statement: LoggedUpdate) -> bool:
    """Whether a line has the form of a trainer, and its loss another one: of an older release."""
    alone = not statement.begins and not statement.continues
    return alone and statement.loss is None and statement.grad_norm is None


def _said(statement: LoggedUpdate) -> Iterator[Row]:
    """A line counts where it names its update and a loss or a norm."""
    numbers = {SAID[name]: number.value for name in SAID
               if (number := getattr(statement, name)) is not None}  # fmt: skip
    if statement.step is None or not {signals.LOSS, signals.GRAD_NORM} & numbers.keys():
        return
    if (rate := statement.some_lr) is not None:
        numbers[signals.LR] = rate.value
    yield statement.step, numbers, math.nan
