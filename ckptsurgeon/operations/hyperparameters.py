"""Hyperparameters and counters: lr schedule, betas, eps, weight decay, clipping, seed, samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats import Checkpoint, State
from ckptsurgeon.formats.optimizers.table import HYPERPARAMETERS
from ckptsurgeon.formats.schedules.rampup import resized
from ckptsurgeon.operations import taken
from ckptsurgeon.operations.batch import batch_changes, ramp_of
from ckptsurgeon.operations.counters import COUNTERS, counter_changes
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import (
    COUNT,
    EPS,
    FLOAT32,
    FLOAT32_MAX,
    RATE,
    SHARE,
    Limits,
)
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.operations.setter import Setter, short
from ckptsurgeon.plans.edits import AnyChange
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run

DECAY_STYLES = ("constant", "linear", "cosine")


@held
class Hyperparameters(Section):
    """Wanted values, in every place of every shard. A text such as `0.5x` scales the present one.
    `settings` are the numbers that have no key of their own."""

    key: ClassVar[str] = "set"
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

    lr: Annotated[
        float | str | None,
        Key(
            "the peak of the schedule (Megatron's max_lr); with it the rate of the next step",
            "LR",
            "The new peak of the schedule, or a factor such as 0.5x.",
            limits=RATE,
        ),
    ] = None
    min_lr: Annotated[
        float | str | None, Key("the floor of the decay", "--min-lr LR", limits=RATE)
    ] = None
    warmup: Annotated[
        int | None,
        Key(
            "where the warm-up ends, from the start of the run",
            "--warmup SAMPLES",
            value="samples",
            limits=COUNT,
        ),
    ] = None
    decay: Annotated[
        int | None,
        Key(
            "where the decay ends, from the start of the run",
            "--decay SAMPLES",
            value="samples",
            limits=COUNT,
        ),
    ] = None
    decay_style: Annotated[
        str | None,
        Key("", "--decay-style STYLE", "constant, linear or cosine.", one_of=DECAY_STYLES),
    ] = None
    beta1: Annotated[float | None, Key("0 makes Adam forget its first moment", limits=SHARE)] = None
    beta2: Annotated[float | None, Key("", limits=SHARE)] = None
    eps: Annotated[float | str | None, Key("", limits=EPS)] = None
    weight_decay: Annotated[
        float | str | None,
        Key(
            "only in param groups whose weight decay is not 0; biases and layer norms "
            "usually stay at 0",
            limits=RATE,
        ),
    ] = None
    clip_grad: Annotated[float | str | None, Key("0 turns clipping off", limits=FLOAT32)] = None
    seed: Annotated[
        int | None,
        Key(
            "another order of the data",
            value="whole number below 2^32",
            limits=Limits(least=0, most=(1 << 32) - 1),
        ),
    ] = None
    loss_scale: Annotated[
        float | str | None,
        Key("fp16 with a dynamic scaler only", limits=Limits(above=0, most=FLOAT32_MAX)),
    ] = None
    consumed_samples: Annotated[
        int | None, Key("where the data continues; the schedule keeps its own count", limits=COUNT)
    ] = None
    tokens: Annotated[
        int | None, Key("tokens consumed, the token axis of the logs", limits=COUNT)
    ] = None
    iteration: Annotated[
        int | None,
        Key("the number of the last finished step; the folder is not renamed", limits=COUNT),
    ] = None
    data_epoch: Annotated[
        int | None, Key("the pass through the data, where the loader counts batches (OLMo-core)")
    ] = None
    data_batches: Annotated[
        int | None, Key("the batches of that pass that are behind: the next one is read there")
    ] = None
    position: Annotated[
        int | None,
        Key(
            "where the schedule stands: samples with Megatron's AnnealingLR "
            "(`num_steps`), the scheduler's steps elsewhere (`last_epoch`, "
            "`last_batch_iteration`); the rate follows"
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        Key(
            "samples of the next batch: of all ranks (Megatron's `global_batch_size`), or "
            "of one where the trainer keeps that (Hugging Face's `train_batch_size`)",
            limits=Limits(above=0),
        ),
    ] = None
    rampup: Annotated[
        list[str] | None,
        Key(
            "Megatron's ramp-up of the batch size; empty for none",
            value="`[start, increment, samples]`, `[]`",
        ),
    ] = None
    settings: Annotated[
        dict[str, float | str],
        Key(
            "what the param groups of the run's optimizer hold, by its name there: "
            "`momentum`, `alpha`, `rho`, `beta3`, `eps2`, … ([optimizers](optimizers.md))",
            value="number, `0.5x`",
        ),
    ] = dataclasses.field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """The keys that were set, in the order of the table above."""
        fields = dataclasses.asdict(self)
        settings = fields.pop("settings")
        return {k: v for k, v in (fields | settings).items() if v is not None}

    def check(self, recipe: Recipe) -> None:
        ramp_of(self.rampup, self.batch_size)

    def settled(self, state: State) -> Hyperparameters:
        scaled = [key for key, value in self.given().items() if isinstance(value, str)]
        if not scaled:
            return self
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
        setter.warn_moving(values.keys())
        counters = {key: value for key, value in values.items() if key in COUNTERS}
        changes, warnings = counter_changes(run, checkpoint, counters, self.position is not None)
        ramp = ramp_of(self.rampup, self.batch_size)
        if ramp is not None or self.batch_size is not None:
            more, notes = batch_changes(run, checkpoint, self.batch_size, ramp)
            changes, warnings = [*changes, *more], [*warnings, *notes]
        return [*setter.changes.values(), *changes], [*setter.warnings, *warnings]

    def refuse_untaken(self, changes: Sequence[AnyChange], after: Checkpoint) -> None:
        taken.refuse_untaken(self.given(), changes, after)


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
