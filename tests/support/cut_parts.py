"""Parts of a parameter that several ranks cut in any way, and what lies at the places of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
from hypothesis import strategies as st

from ckptsurgeon.formats import Box, Part, Place

Cut = tuple[tuple[int, int], ...]
"""Of each axis, the first element and the end."""


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Cut]:
    """The blocks of a parameter in one step: ranks cut it along any axes."""
    axes = draw(st.sets(st.integers(0, len(shape) - 1), max_size=3))
    edges = []
    for axis, size in enumerate(shape):
        inner = (
            draw(st.sets(st.integers(1, size - 1), max_size=2)) if axis in axes and size > 1 else ()
        )
        edges.append([0, *sorted(inner), size])
    blocks: list[Cut] = [()]
    for edge in edges:
        blocks = [(*block, pair) for block in blocks for pair in pairwise(edge)]
    return draw(st.permutations(blocks))


@st.composite
def steps(draw: st.DrawFn, shape: tuple[int, ...], whole: Any) -> list[tuple[Part, Any]]:
    """A step that has the parameter `whole`: each part with the tensor that it lies in, which holds
    something else around it. Data ranks share a block element by element."""
    out = []
    for number, block in enumerate(draw(cuts(shape))):
        flat = whole[tuple(slice(*pair) for pair in block)].ravel()
        size, offset = tuple(b - a for a, b in block), tuple(a for a, _ in block)
        box = Box(shape, offset, size)
        inner = draw(st.sets(st.integers(1, flat.size - 1), max_size=3)) if flat.size > 1 else set()
        edges = [0, *sorted(inner), flat.size]
        for first, end in pairwise(edges):
            before = draw(st.integers(0, 3))
            held = numpy.concatenate([numpy.full(before, -1), flat[first:end], numpy.full(2, -1)])
            place = Place(Path(f"{number}.pt"), (), SimpleNamespace(held=held))
            start = before
            part = Part("w", str(number), "master", place, start, start + end - first, first, box)
            out.append((part, held))
    return out


def taken(bands: Any) -> list[int]:
    """What lies at the places of these bands, in their order."""
    return [
        int(column.place.value.held[column.start + row * column.stride + cell * column.step + i])
        for band in bands
        for row in range(band.rows)
        for column in band.columns
        for cell in range(column.cells)
        for i in range(column.width)
    ]
