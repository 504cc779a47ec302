"""The law of `row_order`: fused by groups, stacked, with heads in halves or in pairs, transposed in
one of the runs or not, each element is found, whatever way the two steps cut their parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon.formats import Box, Part, Place
from ckptsurgeon.formats.tensors.geometry import Turned, gathered
from ckptsurgeon.formats.tensors.row_order import (
    HERE,
    THERE,
    Order,
    Section,
    in_one_order,
    turned_in_one_order,
)
from tests.support.cut_parts import steps, taken


class Case(NamedTuple):
    """A parameter here with its parts, the parts of those that it comes from, the order, and in
    which run it is transposed."""

    order: Order
    own: list[Any]
    theirs: list[list[Any]]
    turned: str


def in_pairs(rows: Any, heads: int) -> Any:
    """The rows of heads in halves as torchtitan has them: `view(heads, 2, -1).transpose(1, 2)`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def fused(apart: list[Any], groups: int) -> Any:
    """As Megatron fuses queries, keys and values."""
    split = [rows.reshape(groups, -1, *rows.shape[1:]) for rows in apart]
    return numpy.concatenate(split, axis=1).reshape(-1, *apart[0].shape[1:])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups, half = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))  # of each group
    stacked = draw(st.sampled_from(["", "", HERE, THERE]))
    if stacked:
        heads = [heads[0]] * len(heads)
    further = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    turned = [draw(st.booleans()) for _ in heads]
    sections = tuple(
        Section(2 * half * n, half if turn else 0) for n, turn in zip(heads, turned, strict=True)
    )
    at, halves = 0, []
    for section in sections:
        shape = (groups * section.rows, *further)
        halves.append(numpy.arange(at, at + numpy.prod(shape)).reshape(shape))
        at += halves[-1].size
    pairs = [
        in_pairs(rows, groups * n) if turn else rows
        for rows, n, turn in zip(halves, heads, turned, strict=True)
    ]
    to_pairs = draw(st.booleans())
    there, here = (halves, pairs) if to_pairs else (pairs, halves)
    index = None if stacked else draw(st.sampled_from([None, *range(len(heads))]))
    order = Order(groups, sections, to_pairs, index, stacked)
    if stacked == HERE:
        own, theirs = numpy.concatenate(here), [fused(there, groups)]
    elif stacked == THERE:
        own, theirs = fused(here, groups), [numpy.concatenate(there)]
    elif index is None:
        own, theirs = fused(here, groups), there
    else:
        own, theirs = here[index], [fused(there, groups)]
    turned = draw(st.sampled_from(["", HERE, THERE])) if len(further) == 1 else ""
    own = own.T if turned == HERE else own
    theirs = [rows.T for rows in theirs] if turned == THERE else theirs
    parts = [draw(steps(rows.shape, rows)) for rows in theirs]
    return Case(order, draw(steps(own.shape, own)), parts, turned)


@given(cases())
@settings(max_examples=100)
def test_each_element_comes_from_the_same_element_of_its_head(case: Case) -> None:
    held = {id(part.place): tensor for part, tensor in case.own}
    own = {"master": [part for part, _ in case.own]}
    theirs = [{"master": [part for part, _ in parts]} for parts in case.theirs]
    if case.turned:
        mine, found = turned_in_one_order(own, theirs, case.order, case.turned)
        take = Turned(found["master"]).gathered
    else:
        mine, found = in_one_order(own, theirs, case.order)
        take = partial(gathered, found=found["master"])
    filled = {id(part.place): numpy.full_like(held[id(part.place)], -1) for part, _ in case.own}
    for part in mine["master"]:
        filled[id(part.place)][part.start : part.end] = taken(take(part))
    for part, tensor in case.own:
        assert list(filled[id(part.place)]) == list(tensor)


def test_a_fused_projection_is_a_few_ranges_however_many_heads_there_are() -> None:
    """Its groups are the rows of one matrix; of heads in halves there is a range for each."""
    groups, half, hidden = 50, 8, 4
    queries = SimpleNamespace(shape=(groups * 2 * half, hidden), numel=groups * 2 * half * hidden)
    for turned, ranges in ((0, 1), (half, groups)):
        order = Order(groups, (Section(2 * half, turned),))
        mine, found = in_one_order({"w": [whole(queries)]}, [{"w": [whole(queries)]}], order)
        bands = [band for part in mine["w"] for band in gathered(part, found["w"])]
        assert len(bands) == ranges


def whole(tensor: Any) -> Part:
    return Part.whole("w", "0", "w", Place(Path("0.pt"), (), tensor), Box.all(tensor.shape))
