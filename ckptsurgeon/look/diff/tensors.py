"""Tensors element by element: identical, changed and by how much, missing, or of another shape."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dtypes import FLOATS, ITEM_BYTES, floats
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats import Weight
from ckptsurgeon.formats.tensors.strips import contiguous
from ckptsurgeon.look.diff.files import Difference, Twin
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.progress import Progress, counted
from ckptsurgeon.remote import reads
from ckptsurgeon.workers import Workers, at_work

PART = 1 << 18
"""Elements that are compared at once."""


@frozen
class Changed:
    """A tensor whose elements differ: how many, the norm of the difference as a share of the first
    one's norm, and the largest single difference; None where elements are no numbers."""

    name: str
    file: str
    path: tuple[Key, ...]
    elements: int
    relative: float | None
    largest: float | None


@dataclass
class Tensors:
    """How many are identical, and which are not. `missing` are in one alone, with its shape."""

    identical: int = 0
    changed: list[Changed] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    reshaped: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether all are identical."""
        return not (self.changed or self.missing or self.reshaped)


def of_twins(
    out: Tensors, difference: Difference, jobs: Workers = 8, progress: Progress | None = None
) -> None:
    """Add the tensors of files that both sides have."""
    for file, path, one, other in difference.reshaped:
        name = f"{file}: {'.'.join(map(str, path))}"
        if one is None or other is None:
            out.missing.append((name, f"only in the {'second' if one is None else 'first'}"))
        else:
            out.reshaped.append((name, one, other))
    twins = difference.twins
    with at_work(jobs, len(twins)) as mapped:
        for found in counted(mapped(_twin, twins), "tensors", [1] * len(twins), progress):
            if found is None:
                out.identical += 1
            else:
                out.changed.append(found)


def _twin(twin: Twin) -> Changed | None:
    total = _Total()
    for one, other in zip(twin.one.pieces(), twin.other.pieces(), strict=True):
        with contextlib.ExitStack() as stack:
            for mine, its in zip(_elements(stack, *one), _elements(stack, *other), strict=True):
                total.add(mine, its, one[1].dtype, one[0].byte_order())
    name = ".".join(str(key) for key in twin.path)
    return total.changed(name, twin.file, twin.path)


def _elements(stack: contextlib.ExitStack, archive: Archive, tensor: Tensor) -> Iterator[bytes]:
    """The elements of a tensor in the order of its shape, PART at a time. Those of a view whose
    elements do not lie side by side are read together."""
    import numpy

    record = archive.storage(tensor)
    descriptor = stack.enter_context(archive.opened())
    width = ITEM_BYTES[tensor.dtype]
    start = archive.start + archive.payload(record.name) + tensor.offset * width
    if contiguous(tensor):
        end = start + tensor.numel * width
        for at in range(start, end, PART * width):
            yield reads.bytes_at(archive.path, descriptor, at, min(PART * width, end - at))
        return
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.size, tensor.stride, strict=True))
    kept = numpy.frombuffer(
        reads.bytes_at(archive.path, descriptor, start, span * width), f"V{width}"
    )
    strides = [stride * width for stride in tensor.stride]
    view = numpy.lib.stride_tricks.as_strided(kept, tensor.size, strides, writeable=False)
    for at in range(0, tensor.numel, PART):
        yield view.flat[at : at + PART].tobytes()


class _Total:
    """Two streams of elements, so far."""

    def __init__(self) -> None:
        self.differs = self.counted = 0
        self.squares = self.norm = self.largest = 0.0

    def add(self, one: bytes, other: bytes, dtype: str, order: str) -> None:
        import numpy

        if dtype not in FLOATS:
            self.differs += one != other
            return
        a = floats(one, dtype, order).astype("f8")
        self.norm += float(numpy.dot(a, a))
        if one == other:
            return
        b = floats(other, dtype, order).astype("f8")
        self._values(a, b)

    def _values(self, a: Any, b: Any) -> None:
        import numpy

        with numpy.errstate(all="ignore"):
            unlike = (a != b) & ~(numpy.isnan(a) & numpy.isnan(b))
            difference = numpy.where(unlike, b - a, 0)
            self.differs += int(numpy.count_nonzero(unlike))
            self.counted += 1
            self.squares += float(numpy.dot(difference, difference))
            self.largest = max(self.largest, float(numpy.abs(difference).max(initial=0)))

    def changed(self, name: str, file: str, path: Sequence[Key]) -> Changed | None:
        if not self.differs:
            return None
        relative = largest = None
        if self.counted:
            largest = self.largest
            relative = math.sqrt(self.squares / self.norm) if self.norm else math.inf
        return Changed(name, file, tuple(path), self.differs, relative, largest)


# --- weights -------------------------------------------------------------------------------------


def of_weights(out: Tensors, ones: Iterable[Weight], others: Iterable[Weight]) -> None:
    """Add the weights of two steps by name, each joined over all ranks."""
    mine = {weight.name: weight for weight in ones}
    its = {weight.name: weight for weight in others}
    for name in dict.fromkeys([*mine, *its]):
        one, other = mine.get(name), its.get(name)
        if one is None or other is None:
            out.missing.append((name, f"only in the {'second' if one is None else 'first'}"))
        elif one.shape != other.shape:
            out.reshaped.append((name, str(list(one.shape)), str(list(other.shape))))
        elif (found := _weight(one, other)) is None:
            out.identical += 1
        else:
            out.changed.append(found)


def _weight(one: Weight, other: Weight) -> Changed | None:
    """As numbers: the masters of ZeRO 3 are compared with the weights of another stage as what
    they round to."""
    total = _Total()
    if one.dtype == other.dtype or not {one.dtype, other.dtype} <= set(FLOATS):
        for mine, its in zip(_joined(one), _joined(other), strict=True):
            total.add(mine, its, one.dtype, "<")
        return total.changed(one.name, "", ())
    import numpy

    width = {weight.dtype: ITEM_BYTES[weight.dtype] for weight in (one, other)}
    narrow = min(width, key=lambda dtype: width[dtype])
    for mine, its in zip(_joined(one), _joined(other), strict=True):
        a, b = floats(mine, one.dtype), floats(its, other.dtype)
        a, b = _as(a, narrow), _as(b, narrow)
        total.norm += float(numpy.dot(a, a))
        total._values(a, b)
    return total.changed(one.name, "", ())


def _as(values: Any, dtype: str) -> Any:
    from ckptsurgeon.files.dtypes import from_floats

    return floats(from_floats(values.astype("f4"), dtype), dtype).astype("f8")


def _joined(weight: Weight) -> Iterator[bytes]:
    """Its bytes in order, in blocks of as many elements as any other weight's."""
    size = PART * ITEM_BYTES[weight.dtype]
    held = bytearray()
    with contextlib.ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for path, start, end in weight.spans:
            if path not in descriptors:
                descriptors[path] = reads.opened(path)
                stack.callback(os.close, descriptors[path])
            at = start
            while at < end:
                data = reads.bytes_at(path, descriptors[path], at, min(size - len(held), end - at))
                held += data
                at += len(data)
                if len(held) == size:
                    yield bytes(held)
                    held.clear()
    if held:
        yield bytes(held)
