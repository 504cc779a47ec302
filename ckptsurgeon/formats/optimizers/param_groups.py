"""What the param groups of an optimizer hold, as a promise says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ckptsurgeon.formats.fields.values import StateDict
from ckptsurgeon.formats.optimizers import table
from ckptsurgeon.formats.optimizers.table import TABLE, Known
from ckptsurgeon.plans.promise import Epsilon

Pairs: TypeAlias = tuple[tuple[tuple[float, ...] | None, Epsilon], ...]


def rates(betas: Any) -> tuple[float, ...]:
    return tuple(float(beta) for beta in betas)


def epsilon(eps: Any) -> Epsilon:
    if isinstance(eps, (list, tuple)):
        return tuple(None if item is None else float(item) for item in eps)
    return None if eps is None else float(eps)


def named(headers: Sequence[StateDict], known: Known = TABLE) -> str:
    """What the optimizers are called; empty where their keys are unknown."""
    names = dict.fromkeys(table.name(each, known) for each in headers)
    return " and ".join(name for name in names if name)


def numbers(headers: Sequence[StateDict]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The numbers that the groups hold besides what every optimizer has, of each group."""
    numbers: dict[str, list[float]] = {}
    for each in headers:
        for key in sorted(table.HYPERPARAMETERS & set(each.group)):
            for place in each.group[key]:
                if isinstance(place.value, (int, float)) and not isinstance(place.value, bool):
                    numbers.setdefault(key, []).append(float(place.value))
    return tuple((key, tuple(values)) for key, values in sorted(numbers.items()))


def differ(betas: Sequence[Any], eps: Sequence[Any]) -> bool:
    """Whether one group has others than another."""
    return len({rates(each) for each in betas}) > 1 or len({epsilon(each) for each in eps}) > 1


def pair(betas: Any, eps: Any) -> tuple[tuple[float, ...] | None, Epsilon]:
    """Both of one group; None for what it does not hold."""
    return (None if betas is None else rates(betas), epsilon(eps))
