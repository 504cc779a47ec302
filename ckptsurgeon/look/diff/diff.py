"""The whole answer: changes of values, and with `tensors` of every element. Reads only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.look.diff import layouts
from ckptsurgeon.look.diff import tensors as of_tensors
from ckptsurgeon.look.diff.files import Difference, compare
from ckptsurgeon.look.diff.sides import Side
from ckptsurgeon.look.diff.tensors import Tensors
from ckptsurgeon.look.diff.versions import Version
from ckptsurgeon.plans.edits import ABSENT, AnyChange, Aside, Change, NewText, Rewrite
from ckptsurgeon.plans.edits import Content as NewBytes
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.log_fields import LOGS, TENSORBOARD
from ckptsurgeon.progress import Progress
from ckptsurgeon.transaction.home import EVENTS
from ckptsurgeon.workers import Workers

SMALL = 1 << 20
"""Bytes of a pointer that are read."""
YAML = ".yaml"
"""How the files end that say how a run is started."""


@frozen
class Diff:
    """How `one` and `other` differ. `tensors` is None where they were not asked for, and
    `not_compared` says what could not be held against each other."""

    one: str
    other: str
    changes: tuple[AnyChange, ...]
    tensors: Tensors | None
    not_compared: tuple[str, ...] = ()
    of_surgery: bool = False
    """What only `one` has went to the attic; else it is where it was."""

    @property
    def same(self) -> bool:
        """Whether nothing that was compared differs."""
        return not self.changes and (self.tensors is None or self.tensors.same)


@dataclass
class _Found:
    changes: list[AnyChange] = field(default_factory=list)
    tensors: Tensors | None = None
    not_compared: list[str] = field(default_factory=list)


@collector_paused()
def diff(
    one: Side,
    other: Side,
    *,
    tensors: bool = False,
    jobs: Workers = 8,
    progress: Progress | None = None,
) -> Diff:
    """Two saved steps, or two runs with all their steps. Of one step and a run, the run's latest
    step counts. Raises SurgeryError for a file that can't be read."""
    found = _Found(tensors=Tensors() if tensors else None)
    if one.step is None and other.step is None:
        _runs(found, one, other, jobs, progress)
    else:
        one, other = (
            side if side.step is not None else replace(side, step=side.run.latest())
            for side in (one, other)
        )
        _steps(found, one, other, jobs, progress)
    return Diff(
        str(one), str(other), tuple(found.changes), found.tensors, tuple(found.not_compared)
    )


# --- two steps -----------------------------------------------------------------------------------


def _steps(found: _Found, one: Side, other: Side, jobs: Workers, progress: Progress | None) -> None:
    assert one.step is not None and other.step is not None
    ones, others = one.files(), other.files()
    if layouts.cut(ones) != layouts.cut(others):
        _meanings(found, one.run.checkpoint(one.step), other.run.checkpoint(other.step))
        found.changes += layouts.arguments(ones, others)
        return
    places = one.places() | other.places()
    difference = compare(ones, others)
    found.changes += [replace(change, file=places[change.file]) for change in difference.changes]
    _add(found, difference, jobs, progress)


def _meanings(found: _Found, one: Checkpoint, other: Checkpoint) -> None:
    """Of steps that have no places in common."""
    found.changes += layouts.meaning(one, other)
    found.not_compared.append(f"step {one.step} place by place: its shards are cut in another way")
    if found.tensors is None:
        return
    try:
        mine, its, left = layouts.tensors(one, other)
    except SurgeryError as error:
        found.not_compared.append(f"tensors: {error.what}")
        return
    of_tensors.of_weights(found.tensors, mine, its)
    found.not_compared += [left] if left else []


def _add(found: _Found, difference: Difference, jobs: Workers, progress: Progress | None) -> None:
    if found.tensors is None:
        return
    of_tensors.of_twins(found.tensors, difference, jobs, progress)


# --- two runs ------------------------------------------------------------------------------------


def _runs(found: _Found, one: Side, other: Side, jobs: Workers, progress: Progress | None) -> None:
    mine, its = one.run.steps(), other.run.steps()
    for step in sorted({*mine, *its}):
        if step not in its:
            entries = one.run.entries(step)
            found.changes += [Aside(one.run.relative(p), "checkpoint") for p in entries]
        elif step not in mine:
            for path in other.run.entries(step):
                made = NewBytes(())
                name = other.run.relative(path)
                found.changes.append(Rewrite(name, "checkpoint", made, "new", new_file=True))
        elif layouts.cut(one.saved(step)) != layouts.cut(other.saved(step)):
            _meanings(found, one.run.checkpoint(step), other.run.checkpoint(step))
            found.changes += layouts.arguments(one.saved(step), other.saved(step))
        else:
            difference = compare(one.saved(step), other.saved(step))
            found.changes += difference.changes
            _add(found, difference, jobs, progress)
    difference = compare(one.copies(), other.copies())
    found.changes += difference.changes
    _add(found, difference, jobs, progress)
    found.changes += texts(one.texts(), other.texts())
    found.changes += logs(one.logs(), other.logs())


def texts(ones: Mapping[str, Version], others: Mapping[str, Version]) -> Sequence[AnyChange]:
    """Pointers and small files of text, each by its whole text; a mapping in YAML by its keys."""
    out: list[AnyChange] = []
    for name in dict.fromkeys([*ones, *others]):
        old, new = (_text(versions.get(name)) for versions in (ones, others))
        if old == new:
            continue
        mine, its = _mapping(name, old), _mapping(name, new)
        if mine is None or its is None:
            field = "config" if PurePath(name).suffix == YAML else "latest"
            out.append(NewText(name, field, old, new))
            continue
        for key in dict.fromkeys([*mine, *its]):
            was, now = mine.get(key, ABSENT), its.get(key, ABSENT)
            if was != now:
                out.append(Change(name, str(key), was, now))
    return out


def _mapping(name: str, text: str | None) -> dict[str, Any] | None:
    """What a YAML file holds; None for another file, or one that is not read."""
    if text is None or PurePath(name).suffix != YAML:
        return None
    try:
        return plain_yaml.parse(text, name)
    except UsageError:
        return None


def _text(version: Version | None) -> str | None:
    """The text, of a link to a folder its own; None without a file."""
    if version is None:
        return None
    if disk.is_folder(version.path):
        return str(version.path.readlink())
    with whole_file.regular(version.path) as descriptor:
        return os.read(descriptor, SMALL).decode("utf-8", "replace")


def logs(ones: Mapping[str, Version], others: Mapping[str, Version]) -> Sequence[AnyChange]:
    """Logs that one side lacks, or whose bytes differ."""
    out: list[AnyChange] = []
    for name in dict.fromkeys([*ones, *others]):
        one, other = ones.get(name), others.get(name)
        if one is None:
            out.append(Rewrite(name, field_of(name), NewBytes(()), "new", new_file=True))
        elif other is None:
            out.append(Aside(name, field_of(name)))
        elif not _alike(one, other):
            sizes = f"{one.length()} → {count(other.length(), 'byte')}"
            out.append(Rewrite(name, field_of(name), NewBytes(()), sizes))
    return out


def field_of(name: str) -> str:
    """The field of the changes of a log."""
    return TENSORBOARD if EVENTS in name else LOGS


def _alike(one: Version, other: Version) -> bool:
    if one.same_bytes(other):
        return True
    if one.length() != other.length():
        return False
    with one.path.open("rb") as mine, other.path.open("rb") as its:
        while data := mine.read(1 << 20):
            if data != its.read(len(data)):
                return False
    return True
