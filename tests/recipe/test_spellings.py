"""A section means the same in Python as in a recipe: the same values, or UsageError."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from ckptsurgeon import (
    ClipMoments,
    Graft,
    GroupSettings,
    Hyperparameters,
    Moments,
    Precision,
    Recipe,
    Reset,
    Rewarm,
    RewarmSchedule,
    Rollback,
    Run,
    SwapOptimizer,
    Transplant,
    plan,
)
from ckptsurgeon.errors import UsageError
from ckptsurgeon.operations import kinds
from ckptsurgeon.operations.section import Section
from ckptsurgeon.recipe.file import from_data
from tests.support.tiny_run import make_run

NEEDED: dict[type[Section], dict[str, Any]] = {
    Rollback: {"to": 1},
    GroupSettings: {"params": "norm"},
    RewarmSchedule: {"to": 1e-3, "warmup": 5, "decay": 50},
    Rewarm: {"iterations": 3},
    SwapOptimizer: {"to": "sgdw"},
    Graft: {"step": 1},
    Transplant: {"source": "old"},
    Precision: {"to": "bf16"},
    ClipMoments: {"above": 100.0},
}
"""What a section can't do without."""
FIELDS = [(kind, field.name) for kind in kinds() for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
NUMBERS = some.floats() | some.integers() | some.sampled_from([0, 1, 2, 0.5, 1e-4, 1e6, math.inf])
WRITTEN = some.sampled_from(
    ["0.001", "1e-5", ".5", "5.", "+3E-05", "0.5x", "2x", "1e309", "1e309x", "50%", "1_000", "0x10",
     "x", "", " 1", "nan", "inf", "-1", "true", "exp_avg", "moments", "cosine", "1-5", "adamw"]
)  # fmt: skip
PLAIN = (
    some.none() | some.booleans() | NUMBERS | NUMBERS.map(repr) | WRITTEN | some.text(max_size=4)
)
VALUES = PLAIN | some.lists(PLAIN, max_size=3) | some.dictionaries(WRITTEN, PLAIN, max_size=2)


def in_python(kind: type[Section], fields: dict[str, Any]) -> Section | str:
    """What a caller gets, or the error."""
    try:
        return Recipe(kind(**fields))[kind]
    except UsageError as error:
        return error.what


def in_data(kind: type[Section], fields: dict[str, Any]) -> Section | str:
    """What a recipe means, or its error."""
    field, _ = kind.rest
    rest = fields.get(field)
    flat = {key: value for key, value in fields.items() if key != field}
    if isinstance(rest, dict) and not rest.keys() & {name for each, name in FIELDS if each == kind}:
        flat |= rest
    elif field in fields:
        return "not plain"
    try:
        return from_data({kind.key: flat} if kind.key else flat, where="it")[kind]
    except UsageError as error:
        return error.what.removeprefix("it: ")


def alike(field: tuple[type[Section], str], value: Any) -> None:
    kind, name = field
    fields = {**NEEDED.get(kind, {}), name: value}
    mine, its = in_python(kind, fields), in_data(kind, fields)
    if its == "not plain":
        assert isinstance(mine, str)
    else:
        assert type(mine) is type(its) and repr(mine) == repr(its)


@given(some.sampled_from(FIELDS), VALUES)
@example((Hyperparameters, "lr"), "0.001")
@example((Hyperparameters, "lr"), "1e-5")
@example((Hyperparameters, "lr"), "50%")
@example((Hyperparameters, "lr"), True)
@example((Hyperparameters, "clip_grad"), "0.5")
@example((Hyperparameters, "weight_decay"), "0.05")
@example((Hyperparameters, "beta2"), "0.5x")
@example((Hyperparameters, "lr"), 10**400)
@example((Hyperparameters, "settings"), {"momentum": "0.5"})
@example((GroupSettings, "settings"), {"lr": "0.5"})
@example((Reset, "reset"), "moments")
@example((Reset, "moments"), {"only": "exp_avg"})
@settings(max_examples=150, deadline=None)
def test_python_means_what_a_recipe_means(field: tuple[type[Section], str], value: Any) -> None:
    alike(field, value)


@pytest.mark.slow
@given(some.sampled_from(FIELDS), VALUES)
@settings(max_examples=5000, deadline=None)
def test_python_means_what_every_recipe_means(field: tuple[type[Section], str], value: Any) -> None:
    alike(field, value)


def test_a_plan_takes_the_number_that_was_meant(tmp_path: Path) -> None:
    run = Run.open(str(make_run(tmp_path / "run")))
    typed = plan(run, Recipe(Hyperparameters(lr="0.001", eps="1e-6", weight_decay="0.05")))
    meant = plan(run, Recipe(Hyperparameters(lr=1e-3, eps=1e-6, weight_decay=0.05)))
    assert typed.changes == meant.changes and typed.promise == meant.promise
    assert typed.promise is not None and typed.promise.eps == 1e-6


def test_numbers_of_numpy_and_tuples_are_taken() -> None:
    assert Hyperparameters(lr=numpy.float64(0.5), warmup=numpy.int64(7)).given() == {
        "lr": 0.5, "warmup": 7
    }  # fmt: skip
    assert Hyperparameters(beta1=numpy.float32(0.5)).beta1 == 0.5
    assert Reset(reset=("moments",)).reset == ["moments"]  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [numpy.array([]), numpy.array(["moments"]), None, {}])
def test_a_list_is_made_of_no_array(value: Any) -> None:
    with pytest.raises(UsageError, match=r"`reset` is .*, and not a list of texts"):
        Reset(reset=value)


@pytest.mark.parametrize("value", [object(), b"0.5", 1j, {1}, [0.5], numpy.True_])
def test_anything_else_is_a_usage_error(value: Any) -> None:
    for make in (lambda: Hyperparameters(lr=value), lambda: Moments(only=value)):
        with pytest.raises(UsageError):
            make()
    with pytest.raises(UsageError, match="is not a section"):
        Recipe(value)
