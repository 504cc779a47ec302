"""The state the user wants: Recipe, and what its values may be.

A recipe holds wanted values, not steps: the order of its keys means nothing, what is absent is
kept, and applying it twice changes nothing. `recipe_file.py` reads one.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptsurgeon.errors import UsageError

STATES = ("moments", "loss_scale")
OPTIMIZERS = ("adamw", "sgdw")
REWARMS = ("hold", "ramp")
MAX_ITERATIONS = 1_000_000_000
MAX_SEED = (1 << 32) - 1
"""Of numpy, which trainers draw the order of their data with."""
MAX_COUNT = (1 << 63) - 1
DECAY_STYLES = ("constant", "linear", "cosine")
ORDERS = ("wall", "mtime", "name")
AXES = ("iteration", "samples", "tokens", "gigaflos")
SYNONYMS = {
    "learning_rate": "lr", "max_lr": "lr", "peak_lr": "lr", "lr_warmup_samples": "warmup",
    "warmup_steps": "warmup", "warmup_samples": "warmup", "lr_decay_samples": "decay",
    "decay_steps": "decay", "lr_decay_style": "decay_style", "wd": "weight_decay",
    "grad_clip": "clip_grad", "clip": "clip_grad", "gradient_clipping": "clip_grad",
    "max_grad_norm": "clip_grad", "epsilon": "eps", "b1": "beta1", "b2": "beta2",
    "last_epoch": "position", "num_steps": "position", "last_batch_iteration": "position",
    "beta1": "beta1", "beta2": "beta2", "eps": "eps",
}  # fmt: skip
"""What other trainers call a key of `set`."""


@dataclass(frozen=True)
class Rollback:
    """Back to step `to`: newer checkpoints go to the attic, the pointers name `to`."""

    to: int


@dataclass(frozen=True)
class Repair:
    """The pointers name step `to`, or the newest complete checkpoint; no checkpoint moves."""

    to: int | None = None


@dataclass(frozen=True)
class Hyperparameters:
    """Wanted values. A text such as `0.5x` scales the present one.

    `lr` is the peak of the schedule (Megatron's max_lr); `warmup` and `decay` count samples;
    `consumed_samples`, `tokens` and `iteration` are the counters that the data position, the logs
    and the next step's number come from. `position` is where the schedule stands: in samples with
    Megatron's AnnealingLR, in steps of the scheduler with others."""

    lr: float | str | None = None
    min_lr: float | str | None = None
    warmup: int | None = None
    decay: int | None = None
    decay_style: str | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | str | None = None
    weight_decay: float | str | None = None
    clip_grad: float | str | None = None
    seed: int | None = None
    loss_scale: float | str | None = None
    consumed_samples: int | None = None
    tokens: int | None = None
    iteration: int | None = None
    position: int | None = None

    def given(self) -> dict[str, Any]:
        """The keys that were set, in the order of the table above."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True)
class Replicas:
    """Copies of parameters that drifted apart across tensor-parallel ranks become their mean;
    `params` says of which ones."""

    params: str = ""


@dataclass(frozen=True)
class SwapOptimizer:
    """Go on with the optimizer `to`, adamw or sgdw; of SGDW, its `momentum`, and whether its buffer
    begins as Adam's exp_avg (`keep`) or empty."""

    to: str
    momentum: float = 0.9
    keep: bool = False


@dataclass(frozen=True)
class Moments:
    """What a reset of the moments is confined to: `only` exp_avg, `params` whose names match."""

    only: str | None = None
    params: str | None = None


@dataclass(frozen=True)
class Rewarm:
    """For `iterations` trained iterations the moments fill while the weights stay (`hold`), or the
    rate rises from 0 to its schedule (`ramp`). 0 iterations close a window that is open."""

    iterations: int
    kind: str = "hold"


@dataclass(frozen=True)
class TensorBoard:
    """`truncate` cuts event files at the rollback step (or `after`) by lineage; the cut branch is
    kept as a run of its own named `keep_as` unless `keep` is false; `rename` maps old tag to new.

    `branch`, `order`, `axes` and `samples` (consumed at `after`) decide what the logs can't prove
    (logs/lineage.py); `salvage` drops damaged records; `note` writes the surgery into the
    logs."""

    truncate: bool = True
    after: int | None = None
    keep: bool = True
    keep_as: str | None = None
    rename: dict[str, str] = field(default_factory=dict)
    regex: bool = False
    allow_merge: bool = False
    branch: list[str] = field(default_factory=list)
    order: str | None = None
    axes: dict[str, str] = field(default_factory=dict)
    samples: int | None = None
    salvage: bool = False
    note: bool = True


@dataclass(frozen=True)
class Relaunch:
    """How to start the trainer afterwards: ranks on this machine, and more arguments for it."""

    nproc_per_node: int | None = None
    args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe:
    """Everything one surgery wants. `why` is the logbook line that the receipt keeps."""

    version: int = 1
    name: str = ""
    why: str = ""
    rollback: Rollback | None = None
    repair_latest: Repair | None = None
    set: Hyperparameters = field(default_factory=Hyperparameters)
    reset: list[str] = field(default_factory=list)
    moments: Moments = field(default_factory=Moments)
    rewarm: Rewarm | None = None
    sync_replicas: Replicas | None = None
    swap_optimizer: SwapOptimizer | None = None
    skip: list[str] = field(default_factory=list)
    skip_by_counters: bool = False
    clear_skip: bool = False
    tensorboard: TensorBoard = field(default_factory=TensorBoard)
    relaunch: Relaunch | None = None

    def __post_init__(self) -> None:
        _check(self)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data without what it leaves at its default."""
    return _sparse(recipe)


def _sparse(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        here = getattr(value, item.name)
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if here == default and default is not dataclasses.MISSING:
            continue
        out[item.name] = _sparse(here) if dataclasses.is_dataclass(here) else here
    return out


def unknown_key(key: str, known: Sequence[str], where: str) -> UsageError:
    """The error for a key that does not exist, with the nearest one that does."""
    word = key.rpartition(".")[2].lower().replace("-", "_").removeprefix("adam_")
    words = {name.rpartition(".")[2]: name for name in known}
    meant = SYNONYMS.get(word)
    if meant not in words:
        meant = next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.5)), None)
    near = [words[meant]] if meant is not None else []
    hint = f"did you mean `{near[0]}`?" if near else f"the keys are: {', '.join(known)}"
    return UsageError(f"{where}: unknown key `{key}`", next=hint)


def _unknown_value(text: str, known: Sequence[str], key: str) -> UsageError:
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else f"one of: {', '.join(known)}"
    return UsageError(f"`{key}` is {text!r}", next=hint)


def absolute(recipe: Recipe, present: Mapping[str, float | None]) -> Recipe:
    """The recipe with each `0.5x` replaced by that share of the `present` value: a plan keeps
    absolute values, so that applying it twice changes nothing."""
    resolved: dict[str, Any] = {}
    for key, value in recipe.set.given().items():
        if key != "decay_style" and isinstance(value, str):
            base = present.get(key)
            if base is None:
                raise UsageError(
                    f"`{key}: {value}`: the checkpoint keeps no single {key} to scale",
                    next=f"{key}: NUMBER",
                )
            resolved[key] = float(value[:-1]) * base
    return dataclasses.replace(recipe, set=dataclasses.replace(recipe.set, **resolved))


# --- values --------------------------------------------------------------------------------------


def ranges(texts: Sequence[str]) -> list[tuple[int, int]]:
    """`["6900-7010", "7100"]` as inclusive iteration ranges."""
    out = []
    for text in texts:
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
        if match is None:
            raise UsageError(f"skip range {text!r} is not A-B", next="for example: 6900-7010")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > MAX_COUNT:
            raise UsageError(f"skip range {text!r} is too large", next=f"at most {MAX_COUNT}")
        if first < 1 or last < first:
            wrong = "starts before iteration 1" if first < 1 else "ends before it starts"
            raise UsageError(
                f"skip range {text!r} {wrong}", next="iterations count from 1, and A is at most B"
            )
        out.append((first, last))
    return out


def _check_moments(recipe: Recipe) -> None:
    only, params = recipe.moments.only, recipe.moments.params
    if (only or params) and "moments" not in recipe.reset:
        raise UsageError("`moments` confines a reset that is not wanted", next="reset: [moments]")
    if only == "exp_avg_sq":
        raise UsageError(
            "exp_avg_sq alone is never reset: the next update would be up to 79,500 times lr",
            next="reset moments, or reset moments --only exp_avg",
        )
    if only not in (None, "exp_avg"):
        raise _unknown_value(str(only), ("exp_avg",), "moments.only")
    _check_pattern("moments.params", params or "")
    if recipe.sync_replicas is not None:
        _check_pattern("sync_replicas.params", recipe.sync_replicas.params)


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"`{key}`: {error}", next="a regular expression") from None


def _check_tensorboard(wanted: TensorBoard) -> None:
    if wanted.order is not None and wanted.order not in ORDERS:
        raise _unknown_value(wanted.order, ORDERS, "tensorboard.order")
    for tag, axis in wanted.axes.items():
        if axis not in AXES:
            raise _unknown_value(axis, AXES, f"tensorboard.axes.{tag}")
    for key in ("after", "samples"):
        value = getattr(wanted, key)
        if value is not None and value < 0:
            raise UsageError(f"`tensorboard.{key}` is {value}", next=f"{key} is never below 0")


def _check(recipe: Recipe) -> None:
    if recipe.version != 1:
        raise UsageError(f"recipe version {recipe.version} is not known", next="version: 1")
    for state in recipe.reset:
        if state not in STATES:
            raise _unknown_value(state, STATES, "reset")
    ranges(recipe.skip)
    _check_moments(recipe)
    _check_tensorboard(recipe.tensorboard)
    if recipe.swap_optimizer is not None:
        if recipe.swap_optimizer.to not in OPTIMIZERS:
            raise _unknown_value(recipe.swap_optimizer.to, OPTIMIZERS, "swap_optimizer.to")
        if not 0 <= recipe.swap_optimizer.momentum < 1:
            raise UsageError(
                f"`swap_optimizer.momentum` is {recipe.swap_optimizer.momentum}",
                next="0 <= momentum < 1",
            )
        if recipe.reset or recipe.rewarm is not None:
            raise UsageError(
                "`swap_optimizer` begins the state anew; `reset` and `rewarm` beside it have no "
                "meaning",
                next="drop them",
            )
    if recipe.skip_by_counters and not recipe.skip:
        raise UsageError("`skip_by_counters` without a range", next="skip: [A-B]")
    if recipe.rewarm is not None:
        _check_rewarm(recipe.rewarm)
    wanted = recipe.set
    if wanted.decay_style is not None and wanted.decay_style not in DECAY_STYLES:
        raise _unknown_value(wanted.decay_style, DECAY_STYLES, "set.decay_style")
    bounds = {"beta1": (0.0, 1.0), "beta2": (0.0, 1.0)}
    for key, (low, high) in bounds.items():
        value = getattr(wanted, key)
        if value is not None and not low <= value < high:
            raise UsageError(f"`set.{key}` is {value}", next=f"{low:g} <= {key} < {high:g}")
    for key in ("lr", "min_lr", "weight_decay", "clip_grad", "warmup", "decay", "seed",
                "consumed_samples", "tokens", "iteration"):  # fmt: skip
        value = getattr(wanted, key)
        if isinstance(value, (int, float)) and value < 0:
            raise UsageError(f"`set.{key}` is {value}", next=f"{key} is never below 0")
    for key in ("warmup", "decay", "seed", "consumed_samples", "tokens", "iteration", "position"):
        value, bound = getattr(wanted, key), MAX_SEED if key == "seed" else MAX_COUNT
        if value is not None and value > bound:
            raise UsageError(f"`set.{key}` is {value}", next=f"{key} is at most {bound}")
    for key in ("eps", "loss_scale"):
        value = getattr(wanted, key)
        if isinstance(value, float) and value <= 0:
            raise UsageError(f"`set.{key}` is {value}", next=f"{key} is above 0")
    for section in (recipe.rollback, recipe.repair_latest):
        if section is not None and section.to is not None and section.to < 0:
            raise UsageError(f"step {section.to} is below 0", next="ckptsurgeon status")
    if recipe.rollback is not None and recipe.repair_latest is not None:
        raise UsageError(
            "`rollback` sets the pointers itself; `repair_latest` beside it has no meaning",
            next="drop repair_latest",
        )


def _check_rewarm(wanted: Rewarm) -> None:
    if wanted.kind not in REWARMS:
        raise _unknown_value(wanted.kind, REWARMS, "rewarm.kind")
    if not 0 <= wanted.iterations <= MAX_ITERATIONS:
        raise UsageError(
            f"`rewarm.iterations` is {wanted.iterations}",
            next=f"0 <= iterations <= {MAX_ITERATIONS}; 0 closes a window that is open",
        )
