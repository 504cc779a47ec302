"""A file that may be a log, though neither its name nor the settings say so: by what is in it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptsurgeon import whole_file
from ckptsurgeon.logs import row_file, signals
from ckptsurgeon.plans.frozen import frozen

PRINTED = (".log", ".txt")
"""How the names of files end that may hold any lines: of these only what counts steps is taken."""
DOCUMENT = 4 << 20
"""Bytes of a document of JSON that is looked into."""


@frozen
class Likely:
    """What its lines count or tell, in words, and whether a cut finds its way in them."""

    by: str
    cut: bool


def likely(path: Path) -> Likely | None:
    """What speaks for it; None where nothing does, or the file can't be read. Of a table and of
    JSON lines the head and the end are read."""
    try:
        counter = row_file.counting(path)
        steps = row_file.ending(path, counter)
        if len(set(steps)) > 1 and 3 * _falls(steps) <= len(steps):
            what = "steps" if counter in (None, row_file.UPDATES) else "epochs"
            return Likely(f"{what}, up to {max(steps)}", cut=True)
        first = next(row_file.head(path), {})
        if path.suffix == ".json" or any(isinstance(value, dict) for value in first.values()):
            return _within(path)
        loss = next((name for name in first if "loss" in name.lower()), None)
        if loss is not None and len(first) > 1 and path.suffix not in PRINTED:
            return Likely(f"{loss!r}", cut=False)
    except (OSError, csv.Error):
        pass
    return None


def _falls(steps: Sequence[int]) -> int:
    """How often a start went back; what counts no steps falls at every other record."""
    return sum(b < a for a, b in pairwise(steps))


def _within(path: Path) -> Likely | None:
    """By the steps inside of a document, or inside of each line."""
    text = whole_file.read(path, DOCUMENT).decode("utf-8", "replace")
    try:
        items = [json.loads(text)]
    except (ValueError, RecursionError):
        lines = text.splitlines()[:2]
        items = [item for line in lines for item in _parsed(line)]
    steps = {step for item in items for step in _steps(item)}
    return Likely("steps", cut=False) if len(steps) > 1 else None


def _parsed(line: str) -> Iterator[Any]:
    try:
        yield json.loads(line)
    except (ValueError, RecursionError):
        return


def _steps(item: Any) -> Iterator[int]:
    """The numbers that count in a list of points, in one beside other things, or in what each of
    several names has: `{"loss": {"steps": [1, 2], "values": [3.5, 3.25]}}`."""
    if isinstance(item, list):
        points = [each for each in item if isinstance(each, Mapping)]
        yield from (step for each in points if (step := signals.point(each)[0]) is not None)
    elif isinstance(item, Mapping):
        for value in item.values():
            listed = value.get("steps") if isinstance(value, Mapping) else None
            if isinstance(listed, list):
                yield from (step for step in listed if type(step) is int)
            elif isinstance(value, Mapping) and (step := signals.point(value)[0]) is not None:
                yield step
            elif isinstance(value, list):
                yield from _steps(value)
