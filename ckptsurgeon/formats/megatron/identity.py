"""By what Megatron-LM finds the param groups of a checkpoint again.

Source: `param_group_identifier_keys` in `megatron/core/optimizer/optimizer.py` of 0.19. Two saved
groups that have all of them in common are one to the loader: the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

KEYS = (
    "max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "optimizer",
    "lr_mult", "is_expert_parallel", "is_decoupled_lr",
)  # fmt: skip


def of_group(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of `KEYS`; NeMo puts `pre_` before some, and what is absent is None."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in KEYS)


def twins(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Each pair of groups that are one to the loader, by their numbers."""
    names = [of_group(group) for group in groups]
    return [(i, k) for i, k in combinations(range(len(names)), 2) if names[i] == names[k]]


def differing(groups: Sequence[Mapping[str, Any]], pair: tuple[int, int]) -> list[str]:
    """The keys by which the two groups differ."""
    first, second = (of_group(groups[number]) for number in pair)
    return [key for key, a, b in zip(KEYS, first, second, strict=True) if a != b]


def notes(optimizers: Iterable[Sequence[Mapping[str, Any]]]) -> list[str]:
    """A sentence for each pair that the trainer itself saved so, and that differ in what is not
    asked for: with eps of µP beside a decoupled rate."""
    out = []
    for groups in optimizers:
        for i, k in twins(groups):
            other = [key for key in ("betas", "eps") if groups[i].get(key) != groups[k].get(key)]
            if other:
                out.append(
                    f"param groups {i} and {k} differ in {', '.join(other)} alone, by which the "
                    "trainer does not tell them apart: it loads both from the last one"
                )
    return out
