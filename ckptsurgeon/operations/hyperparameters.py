"""Hyperparameters and counters: lr schedule, betas, eps, weight decay, clipping, seed, samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.plain_yaml import lay
from ckptsurgeon.formats import Checkpoint, State
from ckptsurgeon.formats.optimizers.table import HYPERPARAMETERS
from ckptsurgeon.formats.schedules.rampup import resized
from ckptsurgeon.hints import command
from ckptsurgeon.operations import completion
from ckptsurgeon.operations.batch import batch_changes, ramp_of
from ckptsurgeon.operations.completion import DECAY_STYLES
from ckptsurgeon.operations.counters import COUNTERS, counter_changes
from ckptsurgeon.operations.limits import broken_limit
from ckptsurgeon.operations.section import Changes, Recipe, Section, unknown_value
from ckptsurgeon.operations.setter import Setter, short
from ckptsurgeon.run.run import Run


@dataclass(frozen=True)
class Hyperparameters(Section):
    """Wanted values, in every place of every shard. A text such as `0.5x` scales the present one.

    `lr` is the peak of the schedule (Megatron's max_lr); `warmup` and `decay` count samples;
    `consumed_samples`, `tokens` and `iteration` are the counters that the data position, the logs
    and the next step's number come from; a loader that counts batches goes on with batch
    `data_batches` of pass `data_epoch`. `batch_size` and `rampup` (start, increment, samples) are
    those of the next batch. `position` is where the schedule stands: in samples with
    Megatron's AnnealingLR, in steps of the scheduler with others. `settings` are the other numbers
    that the param groups of the run's optimizer hold, by their names there (momentum, alpha)."""

    key: ClassVar[str] = "set"
    standing: ClassVar[bool] = True
    synonyms: ClassVar[Mapping[str, str]] = {
        "learning_rate": "lr", "max_lr": "lr", "peak_lr": "lr", "lr_warmup_samples": "warmup",
        "warmup_steps": "warmup", "warmup_samples": "warmup", "lr_decay_samples": "decay",
        "decay_steps": "decay", "lr_decay_style": "decay_style", "wd": "weight_decay",
        "grad_clip": "clip_grad", "clip": "clip_grad", "gradient_clipping": "clip_grad",
        "max_grad_norm": "clip_grad", "epsilon": "eps", "b1": "beta1", "b2": "beta2",
        "betas": "beta1 beta2",
        "last_epoch": "position", "num_steps": "position", "last_batch_iteration": "position",
    }  # fmt: skip
    rest: ClassVar[tuple[str, frozenset[str]]] = (
        "settings", HYPERPARAMETERS - frozenset(synonyms),
    )  # fmt: skip

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
    data_epoch: int | None = None
    data_batches: int | None = None
    position: int | None = None
    batch_size: int | None = None
    rampup: list[str] | None = None
    settings: dict[str, float | str] = dataclasses.field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """The keys that were set, in the order of the table above."""
        fields = dataclasses.asdict(self)
        settings = fields.pop("settings")
        return {k: v for k, v in (fields | settings).items() if v is not None}

    def check(self, recipe: Recipe) -> None:
        if self.decay_style is not None and self.decay_style not in DECAY_STYLES:
            raise unknown_value(self.decay_style, DECAY_STYLES, "set.decay_style")
        for key, value in self.given().items():
            if isinstance(value, (str, list)):  # a scale of the present value, or a decay style
                continue
            limit = broken_limit(key, value)
            if limit is not None:
                raise UsageError(f"`set.{key}` is {value}", next=limit)
        ramp_of(self.rampup, self.batch_size)

    def settled(self, state: State) -> Hyperparameters:
        scaled = [key for key, value in self.given().items() if isinstance(value, str)]
        of_schedule = ["scheduler"] if {"lr", "min_lr"} & {*scaled} else []
        state.needed(*scaled, *of_schedule)
        return self.scaled(_present(state))

    def scaled(self, present: Mapping[str, float | None]) -> Hyperparameters:
        """The same with each `0.5x` replaced by that share of the `present` value: a plan keeps
        absolute values, so that applying it twice changes nothing."""
        absolute: dict[str, Any] = {}
        for key, value in self.given().items():
            if key != "decay_style" and isinstance(value, str):
                base = present.get(key)
                if base is None:
                    raise UsageError(
                        f"`{key}: {value}`: the checkpoint keeps no single {key} to scale",
                        next=f"{key}: NUMBER",
                    )
                absolute[key] = float(value[:-1]) * base
        settings = {key: absolute.pop(key, value) for key, value in self.settings.items()}
        return dataclasses.replace(self, settings=settings, **absolute)

    def iteration_after(self, state: State) -> int:
        """The last iteration that counts as done after the surgery."""
        return state.step if self.iteration is None else self.iteration

    def beginning(self, state: State) -> State:
        """The state from which the next iteration goes on: its number and its batch size are those
        after the surgery."""
        ramp = ramp_of(self.rampup, self.batch_size)
        return dataclasses.replace(
            resized(state, self.batch_size, ramp), step=self.iteration_after(state)
        )

    def title(self, run: Run, step: int) -> list[str]:
        pairs = " ".join(f"{key}={short(value)}" for key, value in self.given().items())
        return [f"set {pairs}"] if pairs else []

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        values = self.given()
        setter = Setter(run, checkpoint)
        setter.schedule(values)
        for key in ("beta1", "beta2"):
            if key in values and not checkpoint.locate("betas") and checkpoint.settings(key):
                setter.setting(key, values[key])
            elif key in values:
                setter.beta(int(key[-1]) - 1, values[key])
        for key in ("eps", "weight_decay"):
            if key in values:
                setter.groups(key, values[key])
        for key, value in self.settings.items():
            setter.setting(key, float(value))
        for key in ("clip_grad", "seed"):
            if key in values:
                setter.flagged(key, values[key])
        if "loss_scale" in values:
            setter.loss_scale(values["loss_scale"])
        if "lr" in values:
            setter.warn_leap(values["lr"])
        counters = {key: value for key, value in values.items() if key in COUNTERS}
        changes, warnings = counter_changes(run, checkpoint, counters, self.position is not None)
        ramp = ramp_of(self.rampup, self.batch_size)
        if ramp is not None or self.batch_size is not None:
            more, notes = batch_changes(run, checkpoint, self.batch_size, ramp)
            changes, warnings = [*changes, *more], [*warnings, *notes]
        return [*setter.changes.values(), *changes], [*setter.warnings, *warnings]


def _present(state: State) -> dict[str, float | None]:
    """What a relative value scales: one number per key, or None where groups differ."""
    promise, schedule = state.promise, state.schedule or {}
    peak = promise.lr if state.peak_lr is None else state.peak_lr
    decays = {value for value in promise.weight_decay or () if value != 0}
    alike = {key: set(values) for key, values in promise.settings or ()}
    return {
        **{key: values.pop() for key, values in alike.items() if len(values) == 1},
        "lr": schedule.get("max_lr", peak),
        "min_lr": schedule.get("min_lr"),
        "eps": promise.eps if isinstance(promise.eps, float) else None,
        "weight_decay": decays.pop() if len(decays) == 1 else None,
        "clip_grad": promise.clip_grad,
        "loss_scale": promise.loss_scale,
    }


# --- commands ------------------------------------------------------------------------------------


def settings_of(pairs: Sequence[str]) -> list[str]:
    """`lr=3e-5` as it stands in a recipe: `set.lr=3e-5`."""
    if len(pairs) == 2 and not any("=" in pair for pair in pairs):
        key, value = pairs
        raise UsageError(f"{key!r} is not KEY=VALUE", next=command("set", f"{key}={value}"))
    bare = next((pair for pair in pairs if "=" not in pair), None)
    if bare is not None:
        raise UsageError(f"{bare!r} is not KEY=VALUE", next="for example: lr=3e-5")
    return [pair if pair.startswith("set.") else f"set.{pair}" for pair in pairs]


def keys(ctx: typer.Context) -> list[str]:
    """KEY= of what `set` can change, and of what else the param groups of the latest step hold."""
    known = [key for key in Hyperparameters.__dataclass_fields__ if key != "settings"]
    run = completion.run_of(ctx)
    try:
        own = () if run is None else run.state(run.latest()).promise.settings or ()
    except (SurgeryError, OSError):
        own = ()
    return [f"{key}=" for key in dict.fromkeys((*known, *(key for key, _ in own)))]


def set_lr(
    lr: Annotated[
        str | None,
        typer.Argument(
            metavar="LR", help="The new peak of the schedule, or a factor such as 0.5x."
        ),
    ] = None,
    scale: Annotated[
        str | None, typer.Option("--scale", metavar="FACTOR", help="Multiply the peak instead.")
    ] = None,
    min_lr: Annotated[
        str | None, typer.Option("--min-lr", metavar="LR", help="Final learning rate.")
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option(
            "--warmup", metavar="SAMPLES", help="Where the warm-up ends, from the start of the run."
        ),
    ] = None,
    decay: Annotated[
        str | None,
        typer.Option(
            "--decay", metavar="SAMPLES", help="Where the decay ends, from the start of the run."
        ),
    ] = None,
    decay_style: Annotated[
        str | None,
        typer.Option(
            "--decay-style",
            metavar="STYLE",
            help="constant, linear or cosine.",
            autocompletion=completion.decay_styles,
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Start the schedule again: --warmup and --decay then count iterations from here.",
        ),
    ] = False,
) -> dict[str, Any]:
    """Change the learning-rate schedule.

    Examples:
    ckptsurgeon set-lr 3e-5
    ckptsurgeon set-lr --scale 0.5 --min-lr 1e-6
    ckptsurgeon set-lr 3e-4 --restart --warmup 500 --decay 20000
    """
    if lr is not None and scale is not None:
        raise UsageError("both LR and --scale were given", next=command("set-lr", "--scale", "0.5"))
    settings = {
        "lr": f"{scale}x" if scale is not None else lr,
        "min_lr": min_lr,
        "warmup": warmup,
        "decay": decay,
        "decay_style": decay_style,
    }
    if restart:
        if None in (lr, warmup, decay):
            raise UsageError(
                "a schedule that starts again needs its peak, warm-up and decay",
                next=command("set-lr", "3e-4", "--restart", "--warmup", "500", "--decay", "20000"),
            )
        names = {"lr": "to", "decay_style": "shape"}
        settings = {f"rewarm_schedule.{names.get(k, k)}": v for k, v in settings.items()}
        return lay({}, [f"{key}={value}" for key, value in settings.items() if value is not None])
    pairs = [f"set.{key}={value}" for key, value in settings.items() if value is not None]
    if not pairs:
        raise UsageError("no learning rate was given", next=command("set-lr", "3e-5"))
    return lay({}, pairs)


def set_values(
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE",
            help="For example: beta2=0.95 eps=1e-8",
            autocompletion=keys,
        ),
    ],
    params: Annotated[
        str | None,
        typer.Option("--params", metavar="REGEX", help="Only param groups of such parameters."),
    ] = None,
) -> dict[str, Any]:
    """Change hyperparameters in every place that keeps them.

    KEY is lr min_lr warmup decay decay_style beta1 beta2 eps weight_decay clip_grad seed
    loss_scale batch_size rampup, a counter (consumed_samples tokens iteration position data_epoch
    data_batches), or what the param groups of the run's optimizer hold (momentum alpha beta3). A
    VALUE such as 0.5x scales the present one.

    Examples:
    ckptsurgeon set beta2=0.95 eps=1e-8
    ckptsurgeon set weight_decay=0.5x --dry-run
    ckptsurgeon set batch_size=512
    """
    if params is None:
        return lay({}, settings_of(settings))
    pairs = [f"set_params.{pair.removeprefix('set.')}" for pair in settings]
    data = lay({}, pairs)
    data["set_params"]["params"] = params
    return data


SECTIONS = (Hyperparameters,)
COMMANDS = {"set-lr": set_lr, "set": set_values}
