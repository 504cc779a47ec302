"""Columns of places: the same places as one by one, in as few columns as they can be told apart."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.formats.fields.columns import Column, Places
from ckptsurgeon.formats.fields.values import Place
from ckptsurgeon.plans.edits import ZEROS, Each, Fill

FILE = Path("shard.pt")
KEYS = st.one_of(st.integers(0, 3), st.sampled_from(["state", "exp_avg"]))
PLACES = st.lists(
    st.builds(
        Place,
        st.sampled_from([FILE, Path("other.pt")]),
        st.lists(KEYS, max_size=4).map(tuple),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from([ZEROS, Fill(7)]),
        st.integers(1, 2),
    )
)


@given(PLACES)
def test_no_place_is_lost_or_made_up(places: list[Place]) -> None:
    columns = Places.of(places)
    assert len(columns) == len(places)
    assert sorted(columns, key=repr) == sorted(places, key=repr)
    assert Places.of(columns) is columns


@given(PLACES)
def test_the_places_of_two_columns_differ_in_more_than_one_key(places: list[Place]) -> None:
    columns = [column for column in Places.of(places).columns if len(column.path) > 1]
    seen = {
        (c.file, len(c.path), c.path[:-2], c.path[-1:], c.wins, c.zero, c.chunks) for c in columns
    }
    assert len(seen) == len(columns)


def test_one_column_has_a_path_for_each_of_its_values() -> None:
    column = Column.under(FILE, ("state",), {3: 1.0, 5: 2.0, 8: 3.0}, ("step",))
    assert column.path == ("state", Each((3, 5, 8)), "step")
    assert [*column] == [
        Place(FILE, ("state", 3, "step"), 1.0),
        Place(FILE, ("state", 5, "step"), 2.0),
        Place(FILE, ("state", 8, "step"), 3.0),
    ]
    first, _, third = column
    assert [*column.only([0, 2])] == [first, third]
    assert column.only([1]).path == ("state", 5, "step"), "one place has a plain path"
    assert column.only([0, 1, 2]) is column


def test_a_column_is_split_by_what_its_values_have_in_common() -> None:
    column = Column.under(FILE, ("state",), {3: 1.0, 5: 2, 8: 3.0}, ("step",))
    floats, (integer,) = (part for _, part in column.split(type))
    assert [*floats] == [place for place in column if type(place.value) is float]
    assert integer.path == ("state", 5, "step")
    assert [*column.split(bool)] == [(True, column)]


def test_places_are_a_sequence() -> None:
    columns = Column.under(FILE, (), {"a": 1, "b": 2}, ("x",)), Column.of(Place(FILE, (), 3))
    places = Places(columns)
    assert [place.value for place in places] == [1, 2, 3]
    assert places[2] == Place(FILE, (), 3)
    assert places[:2] == [Place(FILE, ("a", "x"), 1), Place(FILE, ("b", "x"), 2)]
    assert not Places(())
