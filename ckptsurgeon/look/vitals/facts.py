"""What can't be true of a checkpoint's tensors, whatever was trained: `verify` fails on it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.formats import MOMENTS, Checkpoint
from ckptsurgeon.formats.fields.constants import ODD
from ckptsurgeon.look.vitals import bound
from ckptsurgeon.look.vitals.jobs import Job, Range, Source, jobs
from ckptsurgeon.look.vitals.reading import Reading
from ckptsurgeon.look.vitals.scan import scan
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.progress import Progress
from ckptsurgeon.workers import Workers

SHOWN = 3
"""Parameters that one finding names."""
AVERAGED = "sync_replicas"
SYNCED = re.compile(r"(?:weights|master) of (.+)")
"""The field of a change by that section of a recipe: means of both are rounded on their own."""


@dataclass
class Moment:
    """The sum of the absolute values of all elements of one kind, and the largest of them."""

    l1: float = 0.0
    max: float = 0.0


@dataclass
class Values:
    """What was read of the elements of one step, and what of it could not be held against
    anything, a sentence each."""

    readings: list[Reading]
    not_compared: list[str]

    @property
    def moments(self) -> dict[str, Moment]:
        """Of each kind that there is."""
        out: dict[str, Moment] = {}
        for kind in MOMENTS:
            numbers = [r.kinds[kind] for r in self.readings if kind in r.kinds]
            if numbers:
                largest = max(item.largest for item in numbers)
                out[kind] = Moment(sum(item.l1 for item in numbers), largest)
        return out


def read(
    checkpoint: Checkpoint | None,
    sources: Sequence[Source],
    receipts: Sequence[Receipt],
    *,
    workers: Workers = 8,
    observe: bool = False,
    progress: Progress | None = None,
) -> Values:
    """Every float of `sources`, once. `receipts` are the standing surgeries of the run."""
    step = 0 if checkpoint is None else checkpoint.step
    edits = () if checkpoint is None else bound.betas_edited(receipts, step, _adam_step(checkpoint))
    found = jobs(checkpoint, sources, edits)
    readings = scan(found, workers=workers, observe=observe, progress=progress)
    synced = {
        match[1]
        for receipt in receipts
        if receipt.step == step and AVERAGED in receipt.recipe
        for change in receipt.changes
        if isinstance(change, Change) and (match := SYNCED.fullmatch(change.field))
    }
    for reading in readings:
        if reading.parameter in synced:
            reading.compared = reading.stale = 0
    out = Values(readings, _not_compared(found, bool(edits)))
    if not any(reading.compared for reading in readings):
        out.not_compared.append(f"masters: {_no_masters(checkpoint)}")
    if synced:
        out.not_compared.append(f"masters of {named(sorted(synced))}: sync-replicas averaged them")
    return out


def _adam_step(checkpoint: Checkpoint) -> float | None:
    try:
        steps = [float(p.value) for p in checkpoint.locate("adam_step") if p.wins]
    except (SurgeryError, TypeError, ValueError):
        return None
    return max(steps, default=None)


def _no_masters(checkpoint: Checkpoint | None) -> str:
    """Why none is held against its weight."""
    try:
        kinds = set() if checkpoint is None else {part.kind for part in checkpoint.parts()}
    except (SurgeryError, *ODD):
        kinds = set()
    if "master" in kinds and "weights" not in kinds:
        return "the step keeps no weights beside them"
    if "weights" in kinds and "master" not in kinds:
        return "the step keeps none beside the weights"
    return "none is known by its weight here"


def _not_compared(found: Sequence[Job], edited: bool) -> list[str]:
    out = []
    pairs = [job for job in found if job.strip is not None and job.strip.adam is not None]
    if not pairs:
        out.append("Adam's bound: no moments of Adam are here")
    else:
        without = [job for job in pairs if job.limit is None]
        if without:
            some = f"{len(without)} of {count(len(pairs), 'tensor')}"
            out.append(f"Adam's bound in {some}: {_why(without, edited)}")
    return out


def _why(without: Sequence[Job], edited: bool) -> str:
    adams = [job.strip.adam for job in without if job.strip is not None and job.strip.adam]
    if not any(adam.lawful for adam in adams):
        return "the optimizer is not known to be Adam"
    if all(adam.betas is None for adam in adams):
        return "the betas are not in the checkpoint"
    if edited:
        return "betas were edited a short while ago"
    return "these betas have no bound"


# --- findings ------------------------------------------------------------------------------------


def findings(values: Values) -> list[str]:
    """A sentence for each thing that is wrong, a file at a time."""
    out = list(_records(values.readings))
    for file, mine in _by_file(values.readings):
        out += _bounds(str(file), mine)
        out += _masters(str(file), mine)
    return out


def _records(readings: Iterable[Reading]) -> Iterator[str]:
    """NaN and Inf in each record of floats, and negative numbers in exp_avg_sq."""
    wrong: dict[tuple[Path, int, str, str], tuple[Range, int, int]] = {}
    for reading in readings:
        for item in reading.job.ranges:
            numbers, width = reading.kinds[item.kind], ITEM_BYTES[item.dtype]
            below = numbers.negative if item.kind == "exp_avg_sq" else 0
            for what, number, first in (
                ("NaN or Inf", numbers.wild, numbers.first_wild),
                ("negative numbers", below, numbers.first_negative),
            ):
                if number:
                    key = (item.archive.path, item.archive.start, item.record, what)
                    offset = item.start + first * width
                    known = wrong.get(key, (item, 0, offset))
                    wrong[key] = (item, known[1] + number, min(offset, known[2]))
    for (_, _, record, what), (item, number, offset) in wrong.items():
        role = f" ({item.kind})" if item.kind in MOMENTS else ""
        elements = item.archive.record(record).size // ITEM_BYTES[item.dtype]
        yield (
            f"{item.archive.where}: byte {offset}: the record {record!r}{role} has {what}: "
            f"{number} of {count(elements, 'element')}"
        )


def _by_file(readings: Iterable[Reading]) -> list[tuple[Path, list[Reading]]]:
    files: dict[Path, list[Reading]] = {}
    for reading in readings:
        files.setdefault(reading.file, []).append(reading)
    return list(files.items())


def _bounds(where: str, readings: Sequence[Reading]) -> list[str]:
    over = [r for r in readings if r.pair is not None and r.pair.over]
    if not over:
        return []
    pairs = [r.pair for r in over if r.pair is not None]
    worst = max(pairs, key=lambda pair: pair.ratio)
    elements, of = sum(p.over for p in pairs), sum(p.elements for p in pairs)
    return [
        f"{where}: exp_avg is up to {worst.ratio:.4g} times √exp_avg_sq, and no gradients lead "
        f"beyond {worst.limit:.4g}: {elements} of {count(of, 'element')}, in {_names(over)}"
    ]


def _masters(where: str, readings: Sequence[Reading]) -> list[str]:
    stale = [reading for reading in readings if reading.stale]
    if not stale:
        return []
    elements, of = sum(r.stale for r in stale), sum(r.compared for r in stale)
    return [
        f"{where}: the fp32 masters do not round to the weights: {elements} of "
        f"{count(of, 'element')}, in {_names(stale)}"
    ]


def _names(readings: Iterable[Reading]) -> str:
    return named([reading.parameter for reading in readings])


def named(parameters: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    names = list(dict.fromkeys(parameters))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
