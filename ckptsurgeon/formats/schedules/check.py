"""What no schedule can be: a peak below its floor, a decay that is over with the warm-up, two for
one optimizer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import not_understood
from ckptsurgeon.formats.fields.values import Decay, Place
from ckptsurgeon.hints import command

CALLS = frozenset({"_step_count", "_is_initial", "verbose", "_get_lr_called_within_step"})
"""Keys of torch's schedulers that say nothing of the schedule: copies may differ in them."""

RATES = frozenset(
    {
        "base_lrs", "_last_lr", "max_lrs", "min_lrs", "start_lrs", "final_lrs", "start_lr_scales",
        "final_lr_scales", "num_stage_steps",
    }
)  # fmt: skip
NUMBERS = frozenset(
    {
        "last_epoch", "_step_count", "T_max", "eta_min", "T_0", "T_i", "T_mult", "T_cur", "gamma",
        "step_size", "total_steps", "factor", "start_factor", "end_factor", "total_iters", "power",
        "total_size", "step_ratio", "patience", "cooldown", "num_bad_epochs", "num_warmup_steps",
        "cycle_len", "cycle_mul", "lr_mul", "num_steps", "warmup_steps",
    }
)  # fmt: skip
"""Keys of torch's schedulers that a rate is computed from: lists of numbers, and numbers."""

ASSERTED = ", and the trainer asserts max_lr >= min_lr on resume"
"""What both of Megatron's schedulers make of a low peak."""


AFTER_LOADING = (
    "multiply every rate in the trainer's code once the checkpoint is loaded, in param_groups (lr, "
    "initial_lr, max_lr, min_lr) and in each scheduler (base_lrs, max_lrs): what the code sets "
    "before is replaced on resume"
)
"""What helps where the rates are the checkpoint's and no rule says what to write into it."""


def refuse_low_peak(peak: float, floor: float, asserted: str = "") -> None:
    """Raise UsageError for a peak below the floor; `asserted` says what the trainer makes of it."""
    if peak < floor:
        raise UsageError(
            f"lr {peak:g} is below min_lr {floor:g}{asserted}",
            next=command("set-lr", f"{peak:g}", "--min-lr", f"{peak / 10:g}"),
        )


def refuse_foreign(
    state: Mapping[str, Any], name: str, given: Sequence[Sequence[float]], near: float = 1e-15
) -> None:
    """Raise SurgeryError for the state of a scheduler `name` whose last rates are none of those
    that its formulas give, to a millionth, or to `near`."""
    saved = [float(rate) for rate in state["_last_lr"]]
    for mine in given:
        pairs = zip(saved, mine, strict=True)
        if all(math.isclose(a, b, rel_tol=1e-6, abs_tol=near) for a, b in pairs):
            return
    raise SurgeryError(
        f"the scheduler's last rate is {saved[0]!r}, and {name} at step {state['last_epoch']} "
        f"gives {' or '.join(dict.fromkeys(repr(mine[0]) for mine in given))}: what it makes of "
        "another lr is unknown",
        next=AFTER_LOADING,
    )


def other_rule(name: str, kept: float, given: float) -> SurgeryError:
    """Of a scheduler that is `name` by its keys: the groups have the rate `kept`, and its rule
    gives another one at the saved position."""
    return SurgeryError(
        f"the groups have lr {kept!r}, and {name} gives {given!r} at the saved position: what this "
        "scheduler makes of another lr is not known",
        next=AFTER_LOADING,
    )


def refuse_shape(decay: Decay, shapes: Collection[str]) -> None:
    """Raise SurgeryError for a cooldown of another shape than those that a scheduler knows."""
    if decay.shape not in shapes:
        known = ", ".join(sorted(shapes))
        raise SurgeryError(
            f"this trainer's scheduler knows no decay of the shape {decay.shape}",
            next=command("cooldown", "--shape", "linear", why=f"its shapes are {known}"),
        )


def refuse_no_rate(rate: float) -> None:
    """Raise SurgeryError for a cooldown from a rate of 0."""
    if rate <= 0:
        raise SurgeryError(
            "the rate is 0 here, so nothing is left to decay",
            next=command("set-lr", "LR", why="give it a rate first"),
        )


def refuse_several(checkpoint: str, optimizers: int) -> None:
    """Raise SurgeryError where each of several optimizers has a rate of its own."""
    if optimizers > 1:
        raise SurgeryError(
            f"{checkpoint} holds {count(optimizers, 'optimizer')}, and a recipe has one lr",
            next=(command("show", why="their rates"), AFTER_LOADING),
        )


def one_scheduler(checkpoint: Checkpoint) -> Sequence[Place]:
    """Every place of the scheduler. Raises SurgeryError where there are several for one optimizer,
    as Lightning takes them: each goes on from what the others made of the rate. Raises
    NotUnderstood for one with a value of another kind than torch's classes keep."""
    places = checkpoint.locate("scheduler")
    for place in places:
        refuse_odd(place)
    if any(_apart(place.value, places[0].value) for place in places):
        raise SurgeryError(
            "several schedulers share one optimizer: what they make of a rate together is not "
            "known here",
            next=AFTER_LOADING,
        )
    return places


def _apart(a: Any, b: Any) -> bool:
    """Whether two states are of two schedulers, not copies of one."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return a is not b
    return any(a.get(key) != b.get(key) for key in (a.keys() | b.keys()) - CALLS)


def refuse_early_decay(decay: float, warmup: float, unit: str = "samples") -> None:
    """Raise UsageError for a decay that is over when the warm-up is, both counted in `unit`."""
    if decay <= warmup:
        raise UsageError(
            f"decay {decay} {unit} is not beyond warmup {warmup}",
            next=f"set decay above warmup; both count {unit} from the start of the run",
        )


def samples_of(decay: Decay) -> int:
    """How many samples a cooldown takes. Raises SurgeryError where nothing saved tells."""
    if decay.samples is None:
        raise SurgeryError(
            "the schedule counts samples, and nothing in the checkpoint says how many an iteration "
            "takes",
            next=command(
                "set-lr", "LR", "--min-lr", "0", "--warmup", "SAMPLES", "--decay", "SAMPLES"
            ),
        )
    return decay.samples


def refuse_odd(place: Place) -> None:
    """Raise NotUnderstood where the scheduler at `place` has something else in place of a number or
    of rates."""
    inner = place.value.get("_schedulers") if isinstance(place.value, Mapping) else None
    if isinstance(inner, (list, tuple)):
        for i, each in enumerate(inner):
            refuse_odd(place._replace(path=(*place.path, "_schedulers", i), value=each))
    for key, value in place.value.items() if isinstance(place.value, Mapping) else ():
        path = (*place.path, key)
        if key in RATES and not isinstance(value, (list, tuple)):
            raise not_understood(place.file, path, value, "a list of rates", "scheduler")
        numbers = {path: value} if key in NUMBERS else {}
        if key in RATES:
            numbers = {(*path, i): rate for i, rate in enumerate(value)}
        for where, number in numbers.items():
            if not isinstance(number, (int, float)) or isinstance(number, bool):
                raise not_understood(place.file, where, number, "a number", "scheduler")


def refuse_computed(checkpoint: Checkpoint) -> None:
    """Raise SurgeryError where the optimizer computes its own rate: its lr is None."""
    if any(place.value is None for place in checkpoint.locate("lr")):
        raise SurgeryError(
            "lr is None in a param group: this optimizer computes its own rate",
            next="set relative_step=False and an lr in param_groups in the trainer's code, "
            "once the checkpoint is loaded: what the code sets before is replaced on resume",
        )


def kept_rates(checkpoint: Checkpoint) -> Sequence[Place]:
    """Where param groups keep the rate of the next step. Raises SurgeryError where none does."""
    places = checkpoint.locate("lr")
    if not places:
        raise SurgeryError(
            "the checkpoint keeps no param groups, whose lr the next step uses",
            next="set lr on the trainer's command line",
        )
    return places
