"""Where the consolidated weights of a torch.distributed.checkpoint lie, range by range of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.tree import Tensor, strides
from ckptsurgeon.formats.fields.values import Weight
from ckptsurgeon.hints import command

STATE = re.compile(r"(optimizer|optim|chained_\d+|lr_scheduler|train_state|dataloader|rng_state)\b")
"""How the names of tensors begin that are no weights."""


class Chunk(NamedTuple):
    """A block of a tensor: its bytes start at `start` of `file`, row after row."""

    file: Path
    start: int
    offset: tuple[int, ...]
    size: tuple[int, ...]


def weights(saved: Saved, inside: str | None = None) -> Iterator[Weight]:
    """Every weight, in the order of `.metadata`: what begins with `inside`, where it is given.
    Raises SurgeryError for chunks that are cut along more than two axes, or do not cover their
    tensor."""
    for name, items in saved.items.items():
        foreign = STATE.match(name) if inside is None else not name.startswith(inside)
        if not items.is_tensor or foreign:
            continue
        chunks, dtype = [], ""
        for item in items:
            archive = saved.archive(item)
            tensor = archive.tree()
            if not isinstance(tensor, Tensor) or tensor.stride != strides(tensor.size):
                raise SurgeryError(
                    f"{name} is not saved row after row, so it can't be joined",
                    next="join them with the converter of the trainer",
                )
            archive.storage(tensor)
            dtype = tensor.dtype
            start = item.start + archive.payload(f"data/{tensor.storage}")
            start += tensor.offset * ITEM_BYTES[dtype]
            chunks.append(Chunk(saved.folder / item.file, start, item.offset or (), tensor.size))
        shape = tuple(
            max(c.offset[axis] + c.size[axis] for c in chunks)
            for axis in range(len(chunks[0].size))
        )
        spans = tuple(_spans(name, shape, chunks, ITEM_BYTES[dtype]))
        yield Weight(name.removeprefix("model." if inside is None else inside), dtype, shape, spans)


def _spans(
    name: str, shape: tuple[int, ...], chunks: list[Chunk], item: int
) -> Iterator[tuple[Path, int, int]]:
    """The bytes of the whole tensor, in order: bands of rows, each of one chunk or of several side
    by side."""
    bands: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        bands.setdefault(chunk.offset[0] if chunk.offset else 0, []).append(chunk)
    at = 0
    for first, band in sorted(bands.items()):
        rows = band[0].size[0] if shape else 1
        column = 0
        for chunk in band:
            whole = chunk.size[2:] == shape[2:] and chunk.size[:1] == band[0].size[:1]
            if not whole or (len(shape) > 1 and chunk.offset[1] != column):
                raise SurgeryError(
                    f"{name} is cut in a way that can't be joined here",
                    next="join them with the converter of the trainer",
                )
            column += chunk.size[1] if len(shape) > 1 else 0
        if first != at or (len(shape) > 1 and column != shape[1]):
            raise SurgeryError(
                f"{name}: its chunks do not cover it",
                next=command("verify", "--level", "3", why="list what is missing"),
            )
        at += rows
        if len(band) == 1:
            chunk = band[0]
            yield chunk.file, chunk.start, chunk.start + prod(chunk.size) * item
            continue
        for row in range(rows):
            for chunk in band:
                width = prod(chunk.size[1:]) * item
                yield chunk.file, chunk.start + row * width, chunk.start + (row + 1) * width
