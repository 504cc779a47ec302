"""Whether a value that a shard holds can be what its field means.

A shard may come from anyone: a number that is none, a list that contains itself, or one whose text
would fill the memory is refused with the file before anything is computed from it. A value of a
kind that is not known here is another thing: it stops only what needs it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import Impossible, NotUnderstood, SurgeryError, count
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

MAX_NODES = 10_000
"""Values in the largest field, each reference counted again."""
MAX_INTEGER = 1 << 63
MAX_BETAS = 8
"""Decay rates of the optimizer with the most: Adam has two, AdEMAMix three."""
MAX_RANKS = 1 << 20
"""Ranks of the largest world: a list of file names is made of it."""
RANKS = f"a whole number from 1 to {MAX_RANKS}"

NUMBERS = {
    "max_lr", "min_lr", "initial_lr", "weight_decay", "loss_scale", "warmup", "decay", "adam_step",
}  # fmt: skip
COUNTS = {
    "consumed_samples", "seed", "iteration", "global_steps", "tokens", "global_batch_size",
    "data_epoch", "data_batches", "data_tokens", "batch_size",
}  # fmt: skip


def problem(field: str, value: Any) -> str:
    """What is wrong with `value` as the value of `field`, or the empty string."""
    requirement = "a value of bounded size"
    right = is_bounded(value)
    if field in NUMBERS:
        right, requirement = is_number(value), "a finite number, 0 or more"
    elif field in COUNTS:
        right, requirement = is_count(value), "a whole number, 0 or more"
    elif field == "clip_grad":  # infinite: nothing is clipped
        right, requirement = is_number(value) or value == math.inf, "a number, 0 or more"
    elif field == "betas":
        right = isinstance(value, (list, tuple)) and 2 <= len(value) <= MAX_BETAS
        right, requirement = right and all(map(is_number, value)), "finite numbers, 0 or more"
    elif field in ("lr", "eps"):  # None: the optimizer computes it
        several = field == "eps" and isinstance(value, (list, tuple)) and 0 < len(value) <= 2
        numbers = value if several else [value]
        right = all(item is None or is_number(item) for item in numbers)
        requirement = "a finite number, 0 or more"
    elif field == "skip":
        pairs = value if isinstance(value, (list, tuple)) else [] if value is None else [0]
        right, requirement = all(map(_is_range, pairs)), "a list of pairs of iterations"
    elif field == "rewarm":
        right, requirement = is_window(value), "a re-warm window"
    elif field == "position":  # torch's may be -1
        right, requirement = right and type(value) in (int, float), "a number"
    elif field == "decay_style":
        right, requirement = isinstance(value, str), "a name"
    elif field == "ranks":
        right, requirement = is_count(value) and 0 < value <= MAX_RANKS, RANKS
    return "" if right else refusal(field, value, requirement)


def impossible(value: Any) -> bool:
    """Whether `value` is NaN or infinite, or has such a number side by side, or has no end: no
    trainer goes on with it. All else that a field does not take is of a kind that is not known
    here, which may be sound: -1 is the seed of some, and no limit of others."""
    if _nodes(value) is None:
        return True
    items: Iterable[Any] = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, Mapping):
        items = value.values()
    return any(type(item) is float and not math.isfinite(item) for item in items)


def refusal(field: str, value: Any, requirement: str) -> str:
    """The sentence that `value` is not what `field` must be, with as much of it as can be shown."""
    return f"{field} is {short(value)}, not {requirement}"


def is_window(value: Any) -> bool:
    """[kind, start, end] of a re-warm window, or the empty list."""
    if not isinstance(value, (list, tuple)) or len(value) not in (0, 3):
        return False
    return not value or (value[0] in ("hold", "ramp") and all(map(is_count, value[1:])))


def is_number(value: Any) -> bool:
    """An int or a float, not a bool, from 0 to what a file can mean."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < MAX_INTEGER if isinstance(value, int) else 0 <= value < math.inf


def is_count(value: Any) -> bool:
    """An int, not a bool, from 0 to 2^63."""
    return is_number(value) and isinstance(value, int)


def is_bounded(value: Any) -> bool:
    """Whether a walk through `value` ends soon, and its integers can be printed."""
    nodes = _nodes(value)
    return nodes is not None and not any(
        isinstance(item, int) and abs(item) > MAX_INTEGER for item in nodes
    )


def _nodes(value: Any) -> list[Any] | None:
    """Every value in `value`, itself the first; None where a walk through it does not end soon."""
    nodes = [value]
    for item in nodes:  # which grows
        if isinstance(item, dict):
            nodes += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            nodes += item
        if len(nodes) > MAX_NODES:
            return None
    return nodes


def refuse_rates(rates: Iterable[float]) -> None:
    """Raise SurgeryError for rates that a schedule gives and no trainer can use."""
    for rate in rates:
        if not is_number(rate):
            raise SurgeryError(
                f"the saved schedule gives the rate {rate!r}; a rate must be finite and not "
                "negative",
                next=command("show", why="what the scheduler's state holds"),
            )


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """What can't be computed from the values in `path` is not understood: they are of other kinds
    than the code expects, or are not there."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as e:
        raise NotUnderstood(
            f"{path}: what it holds is not understood here ({type(e).__name__}: {str(e)[:100]})"
        ) from None


@contextlib.contextmanager
def said_in(sentences: list[str]) -> Iterator[None]:
    """What is refused inside is one more of the sentences. What is not understood is none of them:
    the state says it."""
    try:
        yield
    except Impossible as error:
        sentences.append(error.what)
    except NotUnderstood:
        pass
    except SurgeryError as error:
        sentences.append(error.what)


@contextlib.contextmanager
def of_field(field: str) -> Iterator[None]:
    """What is not understood inside is of `field`, and says so."""
    try:
        yield
    except Impossible:  # which says whose number it is
        raise
    except NotUnderstood as error:
        if not error.what.startswith(f"{field} is "):
            error.what = f"{field} is not understood: {error.what}"
        raise


def not_understood(
    file: Path, path: Iterable[Key], value: Any, requirement: str, field: str = ""
) -> NotUnderstood:
    """The error of whoever needs what is at `path`, where `value` is none of the `requirement`."""
    where = ".".join(map(str, path))
    what = f"{file.name}: {where or 'it'} is {short(value)}, not {requirement}"
    return NotUnderstood(f"{field} is not understood: {what}" if field else what)


def _is_range(pair: Any) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(is_count, pair))


def short(value: Any) -> str:
    """As much of a value as a sentence shows."""
    if isinstance(value, (float, bool)) or value is None:
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < MAX_INTEGER else f"of {count(value.bit_length(), 'bit')}"
    return repr(value[:40]) if isinstance(value, str) else f"of type {type(value).__name__}"


def mapping(value: Any) -> Mapping[str, Any]:
    """The value, or an empty one where it is no mapping."""
    return value if isinstance(value, Mapping) else {}
