"""The law of `geometry`: whatever way two steps cut a parameter, each element is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.formats import Box, Part, Place
from ckptsurgeon.formats.tensors import geometry
from ckptsurgeon.formats.tensors.geometry import Unknown, gathered
from tests.support.cut_parts import steps, taken


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    whole = numpy.arange(numpy.prod(shape)).reshape(shape)
    return whole, draw(steps(shape, whole)), draw(steps(shape, whole))


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


@st.composite
def turned_pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    whole = numpy.arange(numpy.prod(shape)).reshape(shape)
    return draw(steps(shape, whole)), draw(steps(shape[::-1], whole.T))


@given(turned_pairs())
def test_each_element_comes_from_the_same_one_of_the_transposed_matrix(pair: Any) -> None:
    template, source = pair
    turned = geometry.Turned([part for part, _ in source])
    for part, held in template:
        assert taken(turned.gathered(part)) == list(held[part.start : part.end])


@given(turned_pairs(), st.data())
def test_what_is_nowhere_in_the_transposed_matrix_is_said_to_be(
    pair: Any, data: st.DataObject
) -> None:
    template, source = pair
    lost = data.draw(st.integers(0, len(source) - 1))
    turned = geometry.Turned([part for i, (part, _) in enumerate(source) if i != lost])
    there = {int(n) for i, (_, held) in enumerate(source) if i != lost for n in held}
    for part, held in template:
        if not {int(n) for n in held[part.start : part.end]} <= there:
            with pytest.raises(Unknown):
                turned.gathered(part)


def test_a_transposed_matrix_is_one_column_however_large_it_is() -> None:
    place = Place(Path("0.pt"), (), None)
    whole = Part("w", "0", "master", place, 0, 5000 * 64, 0, Box.all((5000, 64)))
    other = Part("w", "0", "master", place, 0, 5000 * 64, 0, Box.all((64, 5000)))
    (band,) = geometry.Turned([other]).gathered(whole)
    assert (band.rows, len(band.columns), band.columns[0].cells) == (5000, 1, 64)
    with pytest.raises(Unknown, match="to be transposed"):
        geometry.Turned([whole]).gathered(whole)


def test_a_cut_along_the_columns_is_a_few_ranges_however_many_rows_there_are() -> None:
    shape, place = (5000, 64), Place(Path("0.pt"), (), None)
    whole = Part("w", "0", "master", place, 0, 5000 * 64, 0, Box.all(shape))
    halves = [
        Part("w", str(i), "master", place, 0, 5000 * 32, 0, Box(shape, (0, i * 32), (5000, 32)))
        for i in range(2)
    ]
    assert [len(band.columns) for band in gathered(whole, halves)] == [2]
    assert [(band.rows, len(band.columns)) for band in gathered(halves[1], [whole])] == [(5000, 1)]


@pytest.mark.parametrize("shared", [False, True])
def test_a_part_is_looked_for_among_its_neighbours_alone(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """However many ranks there are, whether they cut a parameter or `shared` it element by element:
    what is compared grows with their number, not its square."""
    compared = 0
    meet = geometry._meet

    def counted(*rects: Any) -> bool:
        nonlocal compared
        compared += 1
        return meet(*rects)

    monkeypatch.setattr(geometry, "_meet", counted)
    own, found = (shares(count) if shared else ranks(count) for count in (512, 384))
    there = geometry.Found(found, own)
    for part in own:
        bands = there.gathered(part)
        assert sum(row.width for band in bands for row in band.columns) == part.end
    assert compared <= 3 * (512 + 384)


def shares(count: int) -> list[Any]:
    """So many, each of which has a stretch of the whole parameter, as ZeRO has."""
    size = 1536 * 4 // count
    return [
        Part(
            "w", "0", "master",
            Place(Path(f"{i}.pt"), (), SimpleNamespace(numel=size)),
            0, size, i * size, Box.all((1536, 4)),
        )
        for i in range(count)
    ]  # fmt: skip


def ranks(count: int) -> list[Any]:
    """So many, which cut the rows of one parameter."""
    rows = 1536 // count
    return [
        Part.whole(
            "w", str(i), "master",
            Place(Path(f"{i}.pt"), (), SimpleNamespace(numel=rows * 4)),
            Box((1536, 4), (i * rows, 0), (rows, 4)),
        )
        for i in range(count)
    ]  # fmt: skip
