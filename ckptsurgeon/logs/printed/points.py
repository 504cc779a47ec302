"""What a trainer says in its logs: TensorBoard's points and rows of CSV, as statements."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import UsageError
from ckptsurgeon.logs.printed import lightning, transformers
from ckptsurgeon.logs.printed.families import Family, Listener
from ckptsurgeon.logs.printed.stated import LoggedUpdate, exact
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.logs.tensorboard.scalars import Point, scalars
from ckptsurgeon.transaction.home import HOME

METRICS = "metrics.csv"
MAX_DOCUMENT = 256 << 20
"""Bytes of a history in a run that are read."""


def in_file(path: Path, speakers: Sequence[Family]) -> Iterator[LoggedUpdate]:
    """The statements in what a trainer printed, in a `metrics.csv` or a `trainer_state.json`."""
    try:
        with path.open(encoding="utf-8", errors="backslashreplace") as file:
            yield from _in_text(path, file, speakers)
    except OSError as error:
        raise _unreadable(path, error) from None


def _in_run(path: Path) -> Iterator[LoggedUpdate]:
    """The same, of a `metrics.csv` that nobody named: nothing waits for it."""
    try:
        data = whole_file.read(path, MAX_DOCUMENT)
    except OSError as error:
        raise _unreadable(path, error) from None
    text = io.StringIO(data.decode("utf-8", "backslashreplace"), newline=None)
    yield from _in_text(path, text, ())


def _in_text(path: Path, file: TextIO, speakers: Sequence[Family]) -> Iterator[LoggedUpdate]:
    first = file.readline()
    if lightning.is_metrics(first):
        yield from lightning.rows(chain([first], file))
    elif path.suffix == ".json" and not _is_record(first):
        yield from _document(path, first + file.read(MAX_DOCUMENT))
    else:
        listener = Listener(speakers)
        for line in chain([first], file):
            yield from listener.feed(line)
        yield from listener.end()


def _is_record(line: str) -> bool:
    """Whether a file is of JSON lines by its first one, as detectron2's `metrics.json` is."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "log_history" not in record


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path} can't be read: {error.strerror}", next="--log FILE that the trainer wrote"
    )


def _document(path: Path, text: str) -> Iterator[LoggedUpdate]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise UsageError(f"{path} is no trainer_state.json", next="--log FILE of printed lines")
    yield from transformers.history(document)


def in_folder(
    folder: Path, speakers: Sequence[Family], since: float | None = None
) -> Iterator[LoggedUpdate]:
    """The statements in the event files and the `metrics.csv` directly in `folder`, file by file.

    With `since`, only in files written to at that time or later, and of their points only those
    logged then."""
    for file in _files(folder):
        if since is not None and file.stat().st_mtime < since:
            continue
        if file.name == METRICS:
            yield from _in_run(file)
        else:
            yield from _of_events(file, speakers, since)


def below(folder: Path) -> list[Path]:
    """`folder` and the folders in it, at any depth, that hold logs; an attic's are no trainer's."""
    if not disk.is_folder(folder):
        raise UsageError(f"{folder} is not a directory", next="--tb DIR with the trainer's logs")
    every = (folder, *sorted(filter(disk.is_folder, disk.below(folder, past_closed=True))))
    own = (here for here in every if HOME not in here.relative_to(folder).parts)
    return [here for here in own if any(True for _ in _files(here))]


def _files(folder: Path) -> Iterator[Path]:
    yield from event_file.files(folder)
    if disk.is_file(folder / METRICS):
        yield folder / METRICS


def _of_events(
    path: Path, speakers: Sequence[Family], since: float | None
) -> Iterator[LoggedUpdate]:
    """One statement a step, in file order, of the family whose tags the file has."""
    for family in speakers:
        wanted = partial(_is_of, family)
        chosen = [p for p in scalars(path, wanted) if since is None or p.wall >= since]
        if chosen:
            yield from _statements(path, family, chosen)
            return


def _statements(path: Path, family: Family, points: Sequence[Point]) -> Iterator[LoggedUpdate]:
    """Points that follow one another at one step are one statement."""
    open_: LoggedUpdate | None = None
    for point in points:
        field, step = _field(family, point.tag), point.step + family.late
        assert field is not None
        if open_ is None or open_.step != step:
            if open_ is not None:
                yield open_
            open_ = LoggedUpdate(family.name, f"{path.name}: step {point.step}:", step=step)
        if getattr(open_, field) is None:
            text = f"{open_.text} {point.tag} {point.value:.6g}"
            number: Any = {field: exact(point.value)}
            open_ = replace(open_, text=text, **number)
    if open_ is not None:
        yield open_


def _is_of(family: Family, tag: str) -> bool:
    return _field(family, tag) is not None


def _field(family: Family, tag: str) -> str | None:
    if tag in family.points:
        return family.points[tag]
    prefixes = family.prefixes or {}
    return next((field for start, field in prefixes.items() if tag.startswith(start)), None)
