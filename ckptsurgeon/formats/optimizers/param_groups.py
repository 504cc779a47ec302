"""What the param groups of an optimizer hold, as a promise says it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ckptsurgeon.formats.fields.values import StateDict
from ckptsurgeon.formats.optimizers import table
from ckptsurgeon.formats.optimizers.table import TABLE, Known
from ckptsurgeon.plans.promise import Epsilon


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


def differing(
    betas: Sequence[Any], eps: Sequence[Any]
) -> tuple[tuple[tuple[float, ...] | None, Epsilon], ...] | None:
    """Both of each param group, or None where all groups have the same."""
    alike = len({rates(each) for each in betas}) < 2 and len({epsilon(e) for e in eps}) < 2
    if alike:
        return None
    return tuple(
        (rates(pair) if pair is not None else None, epsilon(small))
        for pair, small in zip_longest(betas, eps)
    )
