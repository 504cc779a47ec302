"""Whether the next step takes what was asked for. A value that no param group takes is refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import NamesGroups
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.plans.edits import AnyChange, Change

RATES = ("lr", "max_lr", "initial_lr")
"""What a peak is written to."""
WHOLE = ("betas", "eps", "weight_decay", "clip_grad", "seed", "loss_scale", "consumed_samples")
"""Fields that the next step uses as they are written, beside the settings of the groups."""


def refuse_untaken(
    asked: Mapping[str, Any], changes: Sequence[AnyChange], after: Checkpoint
) -> None:
    """Raise SurgeryError where of the values that `changes` write of one field, also where they
    were there before, the step after them would use none. `asked` is what the recipe has.

    What the promise does not know of is not compared. Of several param groups one is enough: the
    others may have a weight decay of 0, or a share of what was asked."""
    written: dict[str, set[Any]] = {}
    for change in changes:
        if isinstance(change, Change):
            field = "lr" if change.field in RATES else change.field
            written.setdefault(field, set()).update(_numbers(change.new, field))
    if "weight_decay" in asked:  # a group whose weight decay is 0 keeps it, or has a share of 0
        own = float(asked["weight_decay"])
        shares = written.get("weight_decay", set())
        written["weight_decay"] = {own, *(share for share in shares if share or not own)}
    for field, values in written.items():
        used = _used(field, after)
        if used and not any(_same(value, other) for value in values for other in used):
            key = next((key for key in asked if key.startswith(field.rstrip("s"))), field)
            value = asked.get(key)
            raise SurgeryError(_reason(key, value, after), next=_instead(key, value, after))


def _numbers(new: Any, field: str) -> Iterator[Any]:
    """What is written, as a promise has it; of a list of rates each."""
    if isinstance(new, (list, tuple)):
        numbers = tuple(None if item is None else float(item) for item in new)
        yield from numbers if field == "lr" else (numbers,)
    elif isinstance(new, (int, float)):
        yield float(new)


def _used(field: str, after: Checkpoint) -> list[Any]:
    """What the next step uses of a field; nothing where that is not known."""
    state = after.state()
    promise = state.promise
    settings = dict(promise.settings or ())
    found: list[Any] = []
    if field == "lr":
        peak = (state.schedule or {}).get("max_lr", state.peak_lr)
        found = [promise.lr, peak, *(after.rates() if promise.lr is not None else ())]
    elif field in ("betas", "eps") and promise.groups:
        found = [pair[field == "eps"] for pair in promise.groups]
    elif field == "weight_decay":
        found = [*(promise.weight_decay or ())]
    elif field in WHOLE:
        found = [getattr(promise, field)]
    elif field in settings:
        found = [*settings[field]]
    return [value for value in found if value is not None]


def _same(value: Any, other: Any) -> bool:
    """A scheduler may compute a rate from its peak, in another order than the surgeon."""
    if isinstance(value, float) and isinstance(other, (int, float)):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


def _reason(key: str, value: Any, after: Checkpoint) -> str:
    if key == "weight_decay" and not any(after.state().promise.weight_decay or ()):
        return "every param group has weight decay 0, so none shows which should decay"
    return f"no param group of the next step takes {key} {value}"


def _instead(key: str, value: Any, after: Checkpoint) -> Hint:
    """How the value gets into groups none of which takes it."""
    named = NamesGroups.optional(after)
    if key == "weight_decay" and named is not None:
        with contextlib.suppress(SurgeryError):  # of one whose file does not say them
            groups = [names for names, _ in named.of_parameters(key) if names]
            ends = [["weight" in name for name in names] for names in groups]
            apart = all(len(set(each)) == 1 for each in ends) and any(map(any, ends))
            words = ("set", f"{key}={value:g}", "--params", "weight" if apart else ".")
            if groups:
                return command(*words, why="of the groups whose parameters' names match")
    return (
        f"set {key} in param_groups in the trainer's code, once the checkpoint is loaded: what the "
        "code sets before is replaced on resume"
    )
