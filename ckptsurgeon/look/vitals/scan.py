"""Reads the elements of a checkpoint once, a thread a file, in blocks that a cache holds.

A thread holds a few arrays of BLOCK elements; what is kept of a parameter is a handful of numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ckptsurgeon.formats import MOMENTS, Adam
from ckptsurgeon.look.vitals import pairs
from ckptsurgeon.look.vitals.bound import FLOOR, QUANTIZED, TOLERANCE
from ckptsurgeon.look.vitals.codes import Decoder
from ckptsurgeon.look.vitals.jobs import Job, by_file
from ckptsurgeon.look.vitals.reader import BLOCK, Reader
from ckptsurgeon.look.vitals.reading import TINY, Numbers, Pair, Reading
from ckptsurgeon.progress import Progress, counted
from ckptsurgeon.workers import Workers, at_work


def scan(
    jobs: Sequence[Job],
    *,
    workers: Workers = 8,
    observe: bool = False,
    progress: Progress | None = None,
) -> list[Reading]:
    """What is read of each job, those of one file in the order of its bytes. With `observe` also
    what only `doctor` says. Raises SurgeryError for a file that changed or is cut short."""
    files = [mine for _, mine in by_file(jobs)]
    out: list[Reading] = []
    with at_work(workers, len(files)) as mapped:
        found = mapped(partial(_file, observe), files)
        for readings in counted(found, "values", [1] * len(files), progress):
            out += readings
    return out


def _file(observe: bool, jobs: list[Job]) -> list[Reading]:
    with contextlib.ExitStack() as stack:
        reader = Reader(stack)
        return [_job(job, reader, observe) for job in jobs]


def _job(job: Job, reader: Reader, observe: bool) -> Reading:
    strip = job.strip
    out = Reading(job)
    shape = None if strip is None else strip.shape
    for item in job.ranges:
        out.kinds[item.kind] = Numbers()
    both = {item.kind for item in job.ranges} >= set(MOMENTS)
    adam = None if strip is None else strip.adam
    if both and adam is not None:
        out.pair = Pair(limit=job.limit)
        narrow = {item.dtype for item in job.ranges if item.kind in MOMENTS}
        tolerance = max(TOLERANCE[dtype] for dtype in narrow)
        law = pairs.Law(adam, job.limit, tolerance, max(FLOOR[dtype] for dtype in narrow))
    if set(job.coded) == set(MOMENTS) and adam is not None:
        _decoded(job, adam, reader, out, observe)
    for at, size in _blocks(job) if job.ranges else ():
        values: dict[str, tuple[Any, Any]] = {}
        finite = True
        for slot, item in enumerate(job.ranges):
            values[item.kind] = reader.block(item, at, size, slot)
            floats = values[item.kind][0]
            sizes = reader.rooms[f"f{floats.itemsize}"].a if item.kind in MOMENTS else None
            fine = out.kinds[item.kind].add(floats, at, sizes)
            finite = finite and (fine or item.kind not in MOMENTS)
            if item.kind == "exp_avg_sq" and out.kinds[item.kind].low < 0:
                out.kinds[item.kind].below_zero(values[item.kind][0], at)
            if observe and item.kind in ("weights", ""):
                _tiny(out.kinds[item.kind], values[item.kind][0], reader)
        if out.pair is not None and finite:
            first, second = (values[kind][0] for kind in MOMENTS)
            if first.dtype != second.dtype:
                first, second = first.astype("f8"), second.astype("f8")
            room = reader.rooms[f"f{first.itemsize}"]
            pairs.add(out.pair, first, second, at, law, room, observe, shape)
        if "master" in values and "weights" in values:
            dtype = next(item.dtype for item in job.ranges if item.kind == "weights")
            pairs.compare(out, values["master"][0], *values["weights"], dtype, at)
    return out


def _decoded(job: Job, adam: Adam, reader: Reader, out: Reading, observe: bool) -> None:
    """Both moments of 8 bits: m as small and v as large as they may have been for the bound, as
    they are for what is observed. Bitsandbytes pads no code, and 0 is among its numbers."""
    import numpy

    betas = adam.betas if adam.betas is not None and len(adam.betas) == 2 else (0.9, 0.999)
    first, second = (
        Decoder(reader, job.coded[kind], beta) for kind, beta in zip(MOMENTS, betas, strict=True)
    )
    if not (first.fits and second.fits):
        return
    out.pair, partial = Pair(limit=job.limit), Pair()
    law = pairs.Law(adam, job.limit, QUANTIZED, FLOOR["float32"])
    free = pairs.Law(adam, None, QUANTIZED, FLOOR["float32"])
    for at, size in _blocks(job):
        (m, off), (v, more) = first.read(at, size), second.read(at, size)
        room = reader.rooms["f4"]
        if observe and numpy.isfinite(m).all() and numpy.isfinite(v).all():
            pairs.add(partial, m, v, at, free, room, True, job.strip.shape if job.strip else None)
        least = numpy.maximum(numpy.abs(m) - off, 0)
        pairs.add(out.pair, least, v + more, at, law, room, False, None)
    for name in ("updates", "faint", "untrained", "rows", "still", "blank", "likeness"):
        setattr(out.pair, name, getattr(partial, name))


def _blocks(job: Job) -> Iterator[tuple[int, int]]:
    """Whole rows where a matrix has rows that fit."""
    row = 1
    if job.strip is not None and job.strip.shape and len(job.strip.shape) > 1:
        row = job.numel // max(1, job.strip.shape[0])
    size = BLOCK // row * row if 0 < row <= BLOCK else BLOCK
    for at in range(0, job.numel, size):
        yield at, min(size, job.numel - at)


def _tiny(numbers: Numbers, values: Any, reader: Reader) -> None:
    """Count zeros and denormals."""
    import numpy

    room = reader.rooms["f8" if values.itemsize == 8 else "f4"].a[: values.size]
    numpy.abs(values, out=room)
    small = int(numpy.count_nonzero(room < TINY))
    if small:
        zeros = int(numpy.count_nonzero(room == 0))
        numbers.zeros += zeros
        numbers.denormal += small - zeros
