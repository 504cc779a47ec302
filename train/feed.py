"""What one parameter of the optimizer is stepped with, in as few pieces as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

SMALL = 2**15
"""Elements that are copied in less time than a call of the kernel takes on a CPU."""


@dataclass(frozen=True)
class Feed:
    """What one parameter is stepped with, instead of its `.grad`: pieces of the gradient that lie
    behind one another, as scaled as they are, which of them enter the statistics here and not on
    another rank, and where the low-precision copy goes."""

    pieces: Sequence[Tensor]
    counted: Sequence[bool]
    out: Tensor | None = None


def joined(pieces: Sequence[Tensor], counted: Sequence[bool], out: Tensor | None = None) -> Feed:
    """The same gradient in fewer pieces, since each costs a launch: neighbours that lie behind one
    another in memory become one as they are, others are copied together on a GPU and where they
    are small."""
    flat = _neighbours(pieces, counted)
    size = sum(piece.numel() for piece, _ in flat) // max(len(flat), 1)
    if len(flat) > 1 and (flat[0][0].device.type != "cpu" or size < SMALL):
        runs = [(key, [piece for piece, _ in run]) for key, run in groupby(flat, lambda p: p[1])]
        flat = [(run[0] if len(run) == 1 else torch.cat(run), key) for key, run in runs]
    return Feed([piece for piece, _ in flat], [one for _, one in flat], out)


def _neighbours(pieces: Sequence[Tensor], counted: Sequence[bool]) -> list[tuple[Tensor, bool]]:
    runs: list[tuple[Tensor, int, bool]] = []  # the first piece, the elements of all
    for piece, one in zip(pieces, counted, strict=True):
        piece = piece.detach().contiguous()
        size = piece.numel()
        if runs and runs[-1][2] == one and _is_behind(*runs[-1][:2], piece):
            first, before, _ = runs.pop()
            runs.append((first, before + size, one))
        else:
            runs.append((piece, size, one))
    return [(first.as_strided((size,), (1,)), one) for first, size, one in runs]


def _is_behind(first: Tensor, size: int, piece: Tensor) -> bool:
    return (
        first.dtype == piece.dtype
        and first.storage_offset() + size == piece.storage_offset()
        and first.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
    )
