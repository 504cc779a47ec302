"""Whether every tensor of a step is that of an earlier one: then what was trained is not in it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dtypes import FLOATS
from ckptsurgeon.files.pickles.tree import Tensor, tensors
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.look.vitals.jobs import Source
from ckptsurgeon.look.vitals.reader import BLOCK


def identical(
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
