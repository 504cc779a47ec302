"""Moments of 8 bits in a transplant: what codes of the source stand for, and codes of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.fields.values import Codes, Located, Place
from ckptsurgeon.formats.tensors.geometry import Rows
from ckptsurgeon.operations.computed_changes import source
from ckptsurgeon.plans.edits import Change, Computed, Each, Key
from ckptsurgeon.plans.sources import Decoded, Encoded, Numbers, Plain, Scales
from ckptsurgeon.run.run import Run

FLOATS = "float32"
"""What codes stand for."""
ITEM = ITEM_BYTES[FLOATS]
Meanings = Mapping[Located, Codes]
"""What the codes of a tensor mean, by its place."""


def decoded(run: Run, checkpoint: Checkpoint, codes: Codes, start: int, end: int) -> Decoded:
    """The numbers of the elements [start, end) of a tensor of codes."""
    bytes, scales, book = (source(run, checkpoint, p, 0, p.value.numel) for p in codes)
    return Decoded(bytes, scales, book, codes.block, start * ITEM, end * ITEM)


def pieces(rows: Rows, number: int) -> Iterator[tuple[int, int]]:
    """The elements [start, end) of the tensor that row `number` has."""
    for cell in range(rows.cells):
        start = rows.start + number * rows.stride + cell * rows.step
        yield start, start + rows.width


def encoded(
    run: Run, checkpoint: Checkpoint, meanings: Meanings, changes: Iterable[Change]
) -> Iterator[Change]:
    """The changes; where one has numbers for codes, the codes and scales of these. What else is in
    a block of theirs keeps its numbers, and gets their scale."""
    by_name: dict[tuple[str, tuple[Key | Each, ...]], Codes] = {
        (run.relative(file), path): codes for (file, path), codes in meanings.items()
    }
    tensors: dict[tuple[str, tuple[Key | Each, ...]], list[Change]] = {}
    for change in changes:
        if (change.file, change.path) in by_name:
            tensors.setdefault((change.file, change.path), []).append(change)
        else:
            yield change
    for name, found in tensors.items():
        for row in _together(found, by_name[name].block):
            yield from _coded(run, checkpoint, by_name[name], row)


def _together(changes: Iterable[Change], block: int) -> list[list[Change]]:
    """Those that share a block, in order."""
    rows: list[list[Change]] = []
    for change in sorted(changes, key=_elements):
        if rows and (_elements(rows[-1][-1])[1] - 1) // block >= _elements(change)[0] // block:
            rows[-1].append(change)
        else:
            rows.append([change])
    return rows


def _elements(change: Change) -> tuple[int, int]:
    assert change.elements is not None
    return change.elements


def _coded(
    run: Run, checkpoint: Checkpoint, codes: Codes, row: Sequence[Change]
) -> Iterator[Change]:
    """The codes and the scales of whole blocks, which these changes have numbers for."""
    block, numel = codes.block, codes.place.value.numel
    start = _elements(row[0])[0] // block * block
    end = min(-(-_elements(row[-1])[1] // block) * block, numel)
    parts: list[Plain] = []
    at = start
    for change in row:
        first, after = _elements(change)
        assert isinstance(change.new, Computed)
        if at < first:
            parts.append(decoded(run, checkpoint, codes, at, first))
        parts += [term for term in change.new.terms[0] if not isinstance(term, (Encoded, Scales))]
        at = after
    if at < end:
        parts.append(decoded(run, checkpoint, codes, at, end))
    blocks = start // block, -(-end // block)
    sizes = end - start, (blocks[1] - blocks[0]) * ITEM
    book = source(run, checkpoint, codes.book, 0, codes.book.value.numel)
    made: tuple[tuple[Place, tuple[int, int], Numbers], ...] = (
        (codes.place, (start, end), Encoded(tuple(parts), book, block, 0, sizes[0])),
        (codes.scale, blocks, Scales(tuple(parts), block, 0, sizes[1])),
    )
    for (place, elements, numbers), size in zip(made, sizes, strict=True):
        computed = Computed("copy", place.value.dtype, size, ((numbers,),), label=str(row[0].new))
        yield replace(row[0], new=computed, path=place.path, elements=elements)
