"""`frozen` and `held` make what `dataclass(frozen=True)` makes, and nobody changes what the API
hands out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptsurgeon
from ckptsurgeon.plans.frozen import frozen, held

VALUES = st.one_of(
    st.integers(0, 2), st.floats(-1, 1), st.text(max_size=1), st.tuples(st.integers(0, 1))
)
FIELDS = st.lists(
    st.fixed_dictionaries({"compare": st.booleans(), "repr": st.booleans()}), max_size=4
)


def _classes(
    decorator: Callable[[type[Any]], type[Any]], fields: list[dict[str, bool]]
) -> tuple[type[Any], type[Any]]:
    """The class with these fields, as `dataclass` makes it and as the decorator does."""

    def bare() -> type[Any]:
        spaces = {f"f{i}": dataclasses.field(**each) for i, each in enumerate(fields)}  # type: ignore[call-overload]
        return type("Made", (), {**spaces, "__annotations__": dict.fromkeys(spaces, "Any")})

    return dataclasses.dataclass(frozen=True)(bare()), decorator(bare())


@pytest.mark.parametrize("decorator", [frozen, held])
@given(fields=FIELDS, data=st.data())
def test_it_compares_hashes_and_prints_as_a_frozen_dataclass(
    decorator: Callable[[type[Any]], type[Any]], fields: list[dict[str, bool]], data: st.DataObject
) -> None:
    usual, ours = _classes(decorator, fields)
    some, others = (
        data.draw(st.lists(VALUES, min_size=len(fields), max_size=len(fields))) for _ in "ab"
    )
    first, second = usual(*some), usual(*others)
    mine, theirs = ours(*some), ours(*others)
    assert (mine == theirs) == (first == second)
    assert mine == ours(*some)
    assert (hash(mine) == hash(theirs)) == (hash(first) == hash(second))
    assert repr(mine) == repr(first)
    assert dataclasses.asdict(mine) == dataclasses.asdict(first)
    assert mine != first, "another class is never equal"


@pytest.mark.parametrize("decorator", [frozen, held])
def test_a_method_of_the_class_stays_and_a_child_has_its_own_fields(decorator: Any) -> None:
    @decorator
    class Parent:
        a: int

        def __str__(self) -> str:
            return "parent"

        def __repr__(self) -> str:
            return f"<{self.a}>"

    @decorator
    class Child(Parent):
        b: int = 2

    assert repr(Parent(1)) == "<1>"
    assert Child(1) != Child(1, 3)
    assert Child(1) != Parent(1)
    assert dataclasses.replace(Child(1), b=4) == Child(1, 4)
    assert repr(Child(1)).endswith("Child(a=1, b=2)")


def test_a_field_of_what_is_held_is_not_set_anew() -> None:
    @held
    class Made:
        a: int = 1

    made = Made()
    for change in (lambda: setattr(made, "a", 2), lambda: delattr(made, "a")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert made == Made(1)


@pytest.mark.parametrize("name", ckptsurgeon.__all__)
def test_what_a_caller_holds_can_not_be_changed(name: str) -> None:
    made = getattr(ckptsurgeon, name)
    if isinstance(made, type) and dataclasses.is_dataclass(made):
        assert made.__dataclass_params__.frozen, name  # type: ignore[attr-defined]
