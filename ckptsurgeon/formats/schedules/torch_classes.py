"""Which of torch's learning-rate schedulers saved a state: it names no class, but its keys do.

Source: `torch/optim/lr_scheduler.py`, 2.4 to 2.13; of LRMultiplier, which is of torch's base class
and saves two keys alone, `detectron2/solver/lr_scheduler.py` at 02b5c4e.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptsurgeon.formats.schedules import espnet, fairseq2, nemo, plateau
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.promise import Caveat

COMMON = frozenset(
    {
        "base_lrs", "last_epoch", "_step_count", "_last_lr", "_is_initial", "verbose",
        "_get_lr_called_within_step",
    }
)  # fmt: skip
KINDS: Mapping[str, frozenset[str]] = {
    "CosineAnnealingLR": frozenset({"T_max", "eta_min"}),
    "CosineAnnealingWarmRestarts": frozenset({"T_0", "T_i", "T_mult", "eta_min", "T_cur"}),
    "OneCycleLR": frozenset(
        {"total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum"}
    ),
    "StepLR": frozenset({"step_size", "gamma"}),
    "MultiStepLR": frozenset({"milestones", "gamma"}),
    "ExponentialLR": frozenset({"gamma"}),
    "ConstantLR": frozenset({"factor", "total_iters"}),
    "LinearLR": frozenset({"start_factor", "end_factor", "total_iters"}),
    "PolynomialLR": frozenset({"total_iters", "power"}),
    "CyclicLR": frozenset(
        {
            "max_lrs", "total_size", "step_ratio", "mode", "gamma", "scale_mode", "cycle_momentum",
            "_scale_fn_custom",
        }
    ),
    nemo.NAME: nemo.KEYS,
    espnet.NAME: espnet.KEYS,
    **fairseq2.KINDS,
}  # fmt: skip
"""Class → what its state has beside COMMON and MOMENTUM. LambdaLR and SequentialLR are told by one
key, ReduceLROnPlateau by `plateau`. One class is NeMo's, one ESPnet's and some are fairseq2's, on
torch's base class."""
MULTIPLIER = "LRMultiplier"
"""detectron2's, which multiplies all of its base rates by one number that its code has."""
BY_CODE = ("LambdaLR", MULTIPLIER)
"""Those whose factor at a position only the trainer's code knows."""
ENDS = ("T_max", "total_steps", "max_steps", "num_steps")
"""Where a state has the step at which the schedule ends."""
MOMENTUM = frozenset({"use_beta1", "base_momentums", "max_momentums"})
"""What a scheduler that cycles the momentum too may have."""


def kind(schedule: Any) -> str:
    """The class whose state this is; empty for a state that no class of torch saves."""
    if not isinstance(schedule, Mapping):
        return ""
    if "_schedulers" in schedule:
        inner = [kind(item) for item in schedule["_schedulers"]]
        cyclic = {"OneCycleLR", "CyclicLR", *plateau.NAMES} & set(inner)
        plain = "_milestones" in schedule and all(inner) and not cyclic
        return "SequentialLR" if plain else ""
    if name := plateau.called(schedule):
        return name
    if not {"base_lrs", "last_epoch"} <= schedule.keys():
        return ""
    if "lr_lambdas" in schedule:
        return "LambdaLR"
    if schedule.keys() - {"_last_lr"} == {"base_lrs", "last_epoch"}:
        return MULTIPLIER
    own = schedule.keys() - COMMON - MOMENTUM
    if own == nemo.SHARED:
        return nemo.ALIKE if nemo.is_alike(schedule) else ""
    return next((name for name, keys in KINDS.items() if keys == own), "")


def is_torch(schedule: Any) -> bool:
    """Whether a saved state is one of a scheduler of torch that can be edited."""
    return bool(kind(schedule))


def multiplied(schedule: Mapping[str, Any]) -> list[float]:
    """What LRMultiplier gives each group, by its largest last rate."""
    base = [float(rate) for rate in schedule["base_lrs"]]
    factor = max(map(float, schedule["_last_lr"])) / max(base)
    return [rate * factor for rate in base]


def moved(schedule: Mapping[str, Any], values: Mapping[str, Any]) -> dict[tuple[Key, ...], Any]:
    """The two counters of a scheduler at its wanted position: one step is made at its birth."""
    if "position" not in values:
        return {}
    counters: dict[tuple[Key, ...], Any] = {("last_epoch",): values["position"]}
    if schedule.get("_step_count"):
        counters["_step_count",] = values["position"] + 1
    return counters


def milestones(saved: Any) -> dict[int, int]:
    """Milestone of MultiStepLR → how often it was given, of its Counter or of a dict of text."""
    if not isinstance(saved, Mapping):
        (saved,) = saved.args
    return {int(at): times for at, times in saved.items()}


def words(schedule: Mapping[str, Any]) -> str:
    """The schedule as a person would say it."""
    if kind(schedule) in plateau.NAMES:
        return plateau.words(schedule)
    text = f"{kind(schedule)}, step {schedule['last_epoch']}"
    end = next((schedule[key] for key in ENDS if key in schedule), None)
    return text if end is None else f"{text} of {end}"


def notes(schedule: Mapping[str, Any]) -> list[str]:
    """What a reader of a promise must know."""
    out = list(_as_text(schedule, "scheduler"))
    if schedule.get("cycle_momentum"):
        name = "beta1" if schedule.get("use_beta1", True) else "momentum"
        out.append(
            Caveat(
                f"{kind(schedule)} cycles {name}: the scheduler sets it anew after each step",
                "betas" if name == "beta1" else name,
            )
        )
    return out


def _as_text(schedule: Mapping[str, Any], where: str) -> Iterator[str]:
    """Of each MultiStepLR whose milestones are no numbers any more, what becomes of it."""
    inner = schedule.get("_schedulers")
    for i, each in enumerate(inner if isinstance(inner, (list, tuple)) else ()):
        if isinstance(each, Mapping):
            yield from _as_text(each, f"{where}._schedulers[{i}]")
    saved = schedule.get("milestones")
    if kind(schedule) == "MultiStepLR" and isinstance(saved, Mapping) and saved:
        times = milestones(saved).items()
        steps = sorted(at for at, n in times for _ in range(n))
        yield (
            "the milestones of MultiStepLR are saved as text, which equals no step: a resume that "
            "takes them as they are saved never lowers the rate, and one that loads them into "
            "those of its code, as dcp.load does, goes by its code and can't save again "
            "(duplicated flatten key). Once it is loaded, set "
            f"{where}.milestones = collections.Counter({steps})"
        )
