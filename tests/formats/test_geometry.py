"""The law of `geometry`: whatever way two steps cut a parameter, each element is found."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.formats import Box, Part, Place
from ckptsurgeon.formats.tensors.geometry import Unknown, gathered

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


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    whole = numpy.arange(numpy.prod(shape)).reshape(shape)
    return whole, draw(steps(shape, whole)), draw(steps(shape, whole))


def taken(bands: Any) -> list[int]:
    """What lies at the places of these bands, in their order."""
    return [
        int(column.place.value.held[column.start + row * column.stride + i])
        for band in bands
        for row in range(band.rows)
        for column in band.columns
        for i in range(column.width)
    ]


@given(pairs())
def test_each_element_of_a_part_comes_from_the_same_element(pair: Any) -> None:
    _, template, source = pair
    found = [part for part, _ in source]
    for part, held in template:
        assert taken(gathered(part, found)) == list(held[part.start : part.end])


@given(pairs(), st.data())
def test_an_element_that_is_nowhere_is_said_to_be(pair: Any, data: st.DataObject) -> None:
    _, template, source = pair
    lost = data.draw(st.integers(0, len(source) - 1))
    found = [part for i, (part, _) in enumerate(source) if i != lost]
    there = {int(n) for i, (_, held) in enumerate(source) if i != lost for n in held}
    for part, held in template:
        wanted = {int(n) for n in held[part.start : part.end]}
        if wanted <= there:
            continue
        with pytest.raises(Unknown):
            gathered(part, found)


def test_a_cut_along_the_columns_is_a_few_ranges_however_many_rows_there_are() -> None:
    shape, place = (5000, 64), Place(Path("0.pt"), (), None)
    whole = Part("w", "0", "master", place, 0, 5000 * 64, 0, Box.all(shape))
    halves = [
        Part("w", str(i), "master", place, 0, 5000 * 32, 0, Box(shape, (0, i * 32), (5000, 32)))
        for i in range(2)
    ]
    assert [len(band.columns) for band in gathered(whole, halves)] == [2]
    assert [(band.rows, len(band.columns)) for band in gathered(halves[1], [whole])] == [(5000, 1)]
