"""Curves of a file that is no event file: CSV, JSON lines, `trainer_state.json`, printed lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import UsageError
from ckptsurgeon.logs import signals
from ckptsurgeon.logs.curves import Curves, Row, of_rows
from ckptsurgeon.logs.printed.families import every
from ckptsurgeon.logs.printed.points import MAX_DOCUMENT
from ckptsurgeon.logs.printed.stated import Stated

TIMES = ("wall_time", "timestamp", "_timestamp", "time", "created_at")
"""The column with the time of a row, in seconds since 1970."""
SAID = {
    "loss": signals.LOSS, "grad_norm": signals.GRAD_NORM, "loss_scale": signals.LOSS_SCALE,
    "consumed_samples": signals.SAMPLES, "batch_size": signals.BATCH_SIZE,
}  # fmt: skip
RATES = ("lr", "next_lr", "either_lr")


def of_file(path: Path, own: Mapping[str, str]) -> Curves:
    """The curves in one file, by its first line: a table with a column of steps, an object a line,
    a `trainer_state.json`, or lines that a trainer printed. `own` names columns of signals.

    Raises UsageError for a file that can't be read."""
    try:
        with path.open(encoding="utf-8", errors="backslashreplace", newline="") as file:
            first = file.readline(MAX_DOCUMENT)
            lines: Iterable[str] = chain([first], file)
            columns = [name.strip() for name in first.strip().split(",")]
            if any(name in columns for name in signals.STEPS) and len(columns) > 1:
                return of_rows(_table(lines, own), path)
            if path.suffix == ".json":
                return of_rows(
                    _records(_document(path, first + file.read(MAX_DOCUMENT)), own), path
                )
            if first.lstrip().startswith("{") and _object(first) is not None:
                objects = (item for line in lines if (item := _object(line)) is not None)
                curves = of_rows(_records(objects, own), path)
                if {signals.LOSS, signals.GRAD_NORM} & curves.kept.keys():
                    return curves
                file.seek(0)  # the bundled trainer's promise is an object above printed lines
                lines = file
            return of_rows(_printed(lines), path)
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}", next="--log FILE that the trainer wrote"
        ) from None
    except csv.Error as error:
        raise UsageError(f"{path}: {error}", next="--log FILE that the trainer wrote") from None


def _table(lines: Iterable[str], own: Mapping[str, str]) -> Iterator[Row]:
    yield from _records(csv.DictReader(line.replace("\0", "") for line in lines), own)


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
    return item if isinstance(item, dict) else None


def _records(items: Iterable[Any], own: Mapping[str, str]) -> Iterator[Row]:
    """Those that have a step and a number of a signal; rows of an evaluation have neither loss nor
    norm under these names."""
    for item in items:
        if not isinstance(item, Mapping):
            continue
        steps = (_number(item.get(name)) for name in signals.STEPS)
        step = next((value for value in steps if value is not None and math.isfinite(value)), None)
        if step is None or not 0 <= step < 1 << 60:
            continue
        filled = [name for name in item if isinstance(name, str) and item[name] not in (None, "")]
        named = signals.found(filled, own)
        values = {signal: _number(item[name]) for signal, name in named.items()}
        numbers = {signal: value for signal, value in values.items() if value is not None}
        if numbers:
            times = (_number(item.get(name)) for name in TIMES)
            when = next((value for value in times if value is not None), math.nan)
            yield int(step), numbers, when


def _printed(lines: Iterable[str]) -> Iterator[Row]:
    """Lines are told apart by their form; those that continue one say more of its update."""
    speakers = every()
    begun: Stated | None = None
    for line in lines:
        statement = next((s for item in speakers if (s := item.read(line)) is not None), None)
        if statement is None:
            continue
        if statement.continues:
            begun = None if begun is None else begun.joined(statement)
            continue
        yield from () if begun is None else _said(begun)
        begun = statement
    yield from () if begun is None else _said(begun)


def _said(statement: Stated) -> Iterator[Row]:
    """A line counts where it names its update and a loss or a norm."""
    numbers = {SAID[name]: number.value for name in SAID
               if (number := getattr(statement, name)) is not None}  # fmt: skip
    if statement.step is None or not {signals.LOSS, signals.GRAD_NORM} & numbers.keys():
        return
    rates = (getattr(statement, name) for name in RATES)
    rate = next((number.value for number in rates if number is not None), None)
    if rate is not None:
        numbers[signals.LR] = rate
    yield statement.step, numbers, math.nan


def _number(value: Any) -> float | None:
    """A number, also as text; NaN and Inf are numbers here. None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
