"""What two saved steps of one run can't both hold: counters, tensors that never moved, v that fell.

v is a mean of squares: in k updates no element of it falls below b2^k of what it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dtypes import FLOATS
from ckptsurgeon.files.pickles.tree import Tensor, tensors
from ckptsurgeon.formats import Checkpoint, Strip
from ckptsurgeon.formats.capabilities import blobs
from ckptsurgeon.look.vitals.bound import FLOOR
from ckptsurgeon.look.vitals.facts import named
from ckptsurgeon.look.vitals.jobs import Planner, Range, Source, strips_of
from ckptsurgeon.look.vitals.reader import BLOCK, Reader
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.plan import Receipt

LOST = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""What rounding takes of a mean that is kept in 16 bits, at most, at every update."""
TOUCHED = ("exp_avg", "exp_avg_sq", "adam step", "iteration", "skipped_steps", "step", "state of")
"""How the fields of changes begin after which two steps are not what one training made."""
MOVED = ("weights of", "master of", "beta")


@dataclass
class Between:
    """What was found, a sentence each, and what could not be compared."""

    findings: list[str]
    not_compared: list[str]


def counters(now: Checkpoint, before: Checkpoint, receipts: Sequence[Receipt]) -> Between:
    """Whether Adam counted as many updates as there are between the two steps. Skip ranges are
    taken off, and overflows where they are counted; where these may have been and are not, only
    a counter that moved further, or back, is a finding."""
    out = Between([], [])
    if not (now.numbered and before.numbered):
        out.not_compared.append("the numbers of these steps do not count updates")
        return out
    moved, why = _moved(now, before)
    if moved is None:
        out.not_compared.append(f"Adam's counter: {why}")
    elif _edited(receipts, before.step, now.step, TOUCHED):
        out.not_compared.append(f"Adam's counter: a surgery between {before.step} and {now.step}")
    else:
        steps = now.state().step - before.state().step
        skipped, known = _skipped(now, before)
        skipped += now.state().promise.passed(before.state().step, now.state().step)
        short = not known and now.state().dynamic_loss_scale and 0 <= moved < steps
        if moved != steps - skipped and not short:
            less = f", {skipped} of them skipped" if skipped else ""
            out.findings.append(
                f"Adam's counter moved by {moved:g} between steps {before.step} and {now.step}: "
                f"{steps} updates{less}"
            )
    return out


def _moved(now: Checkpoint, before: Checkpoint) -> tuple[float | None, str]:
    try:
        steps = [checkpoint.state().promise.adam_step for checkpoint in (now, before)]
    except SurgeryError as error:
        return None, error.what
    if steps[0] is None or steps[1] is None:
        return None, "it is not kept in both steps"
    if steps == [0, 0]:  # as optimizers leave it that do not count there
        return None, "it is 0 in both steps"
    return steps[0] - steps[1], ""


def _skipped(now: Checkpoint, before: Checkpoint) -> tuple[int, bool]:
    counts = [
        max((int(place.value) for place in checkpoint.locate("skipped_steps")), default=None)
        for checkpoint in (now, before)
    ]
    if counts[0] is None or counts[1] is None:
        return 0, False
    return counts[0] - counts[1], True


def _edited(receipts: Iterable[Receipt], first: int, last: int, fields: tuple[str, ...]) -> bool:
    return any(
        change.field.startswith(fields)
        for receipt in receipts
        if receipt.step is not None and first <= receipt.step <= last
        for change in receipt.changes
        if isinstance(change, Change)
    )


def compare(now: Checkpoint, before: Checkpoint, receipts: Sequence[Receipt]) -> Between:
    """Both steps element by element: tensors that are all the same, and v that fell too fast.
    Raises SurgeryError for a file that can't be read."""
    out = counters(now, before, receipts)
    mine, its = _sources(now), _sources(before)
    moved, _ = _moved(now, before)
    if moved != 0 and _identical(now, before, mine, its):
        out.findings.append(
            f"every tensor of step {now.step} is bit for bit that of step {before.step}: what was "
            "trained in between is not in it"
        )
    if _edited(receipts, before.step, now.step, (*TOUCHED, *MOVED)):
        out.not_compared.append(f"exp_avg_sq: a surgery between {before.step} and {now.step}")
        return out
    _fallen(out, now, before, mine, its, moved)
    return out


def _sources(checkpoint: Checkpoint) -> list[Source]:
    strips_of(checkpoint)  # may open further shards
    inside = [Archive.open(b.file, b.start, b.length) for b in blobs(checkpoint)]
    return [Source(archive) for archive in (*checkpoint.archives.values(), *inside)]


# --- all saves equal -----------------------------------------------------------------------------


def _identical(
    now: Checkpoint, before: Checkpoint, mine: Sequence[Source], its: Sequence[Source]
) -> bool:
    """Whether every storage of floats is the same. The CRCs in the directories answer for nearly
    every pair; bytes are read only where all of them agree."""
    ones, others = (
        _storages(checkpoint, sources) for checkpoint, sources in ((now, mine), (before, its))
    )
    if not ones or ones.keys() != others.keys():
        return False
    pairs = [(ones[key], others[key]) for key in ones]
    crcs = ((a.record(n).crc, b.record(m).crc) for (a, n), (b, m) in pairs)
    if any(one != other for one, other in crcs if one and other):
        return False
    return all(_same_bytes(*one, *other) for one, other in pairs)


def _storages(
    checkpoint: Checkpoint, sources: Sequence[Source]
) -> dict[tuple[Any, ...], tuple[Archive, str]]:
    out: dict[tuple[Any, ...], tuple[Archive, str]] = {}
    for number, source in enumerate(sources):
        archive = source.archive
        inside = archive.path.is_relative_to(checkpoint.path)
        name = archive.path.relative_to(checkpoint.path).as_posix() if inside else number
        for path, tensor in tensors(archive.tree()):
            if isinstance(tensor, Tensor) and tensor.dtype in FLOATS and tensor.numel > 1:
                key = (name, number if archive.start else 0, *map(str, path))
                out[key] = (archive, f"data/{tensor.storage}")
    return out


def _same_bytes(one: Archive, name: str, other: Archive, its: str) -> bool:
    size = one.record(name).size
    if size != other.record(its).size:
        return False
    with one.reading(), other.reading() if other is not one else contextlib.nullcontext():
        starts = one.payload(name), other.payload(its)
        for at in range(0, size, BLOCK):
            length = min(BLOCK, size - at)
            if one.read_at(starts[0] + at, length) != other.read_at(starts[1] + at, length):
                return False
    return True


# --- v that fell ---------------------------------------------------------------------------------


def _fallen(
    out: Between,
    now: Checkpoint,
    before: Checkpoint,
    mine: Sequence[Source],
    its: Sequence[Source],
    moved: float | None,
) -> None:
    updates = now.state().step - before.state().step if moved is None else moved
    pairs = _pairs(now, before)
    if not pairs or updates < 0:
        out.not_compared.append("exp_avg_sq: no moments of Adam that both steps have alike")
        return
    ranges, earlier = Planner(mine), Planner(its)
    fallen: dict[Path, list[tuple[str, int]]] = {}
    with contextlib.ExitStack() as stack:
        reader = Reader(stack)
        for strip, older in pairs:
            assert strip.adam is not None and strip.adam.betas is not None
            one = ranges.range(now, strip, "exp_avg_sq")
            other = earlier.range(before, older, "exp_avg_sq")
            if one is None or other is None:
                continue
            least = strip.adam.betas[1] ** updates * (1 - 1e-3 - updates * 2.0**-23)
            least *= (1 - LOST.get(one.dtype, 0.0)) ** updates
            count = _count(reader, one, other, strip.numel, least)
            if count:
                fallen.setdefault(one.archive.path, []).append((strip.parameter, count))
    for file, found in fallen.items():
        elements = sum(count for _, count in found)
        out.findings.append(
            f"{file}: exp_avg_sq fell faster than beta2 allows in {updates:g} updates since step "
            f"{before.step}: {elements} elements, in {named([name for name, _ in found])}"
        )


def _pairs(now: Checkpoint, before: Checkpoint) -> list[tuple[Strip, Strip]]:
    """Strips of the same elements, of an Adam whose betas are the same in both."""
    older = {_key(before, strip): strip for strip in strips_of(before)}
    out = []
    for strip in strips_of(now):
        other = older.get(_key(now, strip))
        if other is None or strip.adam is None or other.adam is None or not strip.adam.lawful:
            continue
        betas = strip.adam.betas
        alike = betas == other.adam.betas and strip.numel == other.numel
        if alike and betas is not None and len(betas) == 2 and "exp_avg_sq" in strip.tensors:
            out.append((strip, other))
    return out


def _key(checkpoint: Checkpoint, strip: Strip) -> tuple[Any, ...]:
    if "exp_avg_sq" not in strip.tensors:
        return ()
    place, first = strip.tensors["exp_avg_sq"]
    inside = place.file.is_relative_to(checkpoint.path)
    file = place.file.relative_to(checkpoint.path) if inside else Path(place.file.suffix)
    return file, place.path, first, strip.parameter


def _count(reader: Reader, one: Range, other: Range, numel: int, least: float) -> int:
    """How many elements are below `least` of what they were, where that is above the floor."""
    import numpy

    count = 0
    floor = max(FLOOR[item.dtype] for item in (one, other))
    for at in range(0, numel, BLOCK):
        size = min(BLOCK, numel - at)
        now, _ = reader.block(one, at, size, 0)
        before, _ = reader.block(other, at, size, 1)
        with numpy.errstate(all="ignore"):
            low = before * least
            count += int(numpy.count_nonzero((now < low) & (low > floor)))
    return count
