"""One saved step of torchtitan: its schedule, its counters, and where its data goes on.

Source: torchtitan's `components/checkpointer/dcp.py`, `components/optimizer/lr_scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.capabilities import CountsMore
from ckptsurgeon.formats.dcp.checkpoint import DcpCheckpoint, scaled
from ckptsurgeon.formats.fields.values import Decay, Place, Setting
from ckptsurgeon.formats.schedules.check import refuse_no_rate
from ckptsurgeon.plans.promise import Caveat


@dataclass
class TorchtitanCheckpoint(DcpCheckpoint, CountsMore):
    """All is among the values of `.metadata`."""

    named_by_folder: ClassVar[bool] = True
    counters: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "iteration": ("train_state.step",),
        "tokens": ("train_state.ntokens_seen",),
    }

    def counted(self, field: str) -> list[Place]:
        """Of the train state."""
        return self.scalar(self.counters[field][0])

    def further_counters(self) -> list[tuple[str, Place]]:
        """Where its LambdaLR stands; the shape is in the config of the trainer."""
        names = [name for name in self.saved.items if name.startswith("lr_scheduler.")]
        return [(name, place) for name in names for place in self.scalar(name)]

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """The groups' lr, and the rates that a saved LambdaLR computes from, all by one factor.

        Raises SurgeryError for what only the trainer's config decides: all but lr."""
        refused = [key for key in values if key != "lr"]
        if refused:
            flags = sorted({self.options[key] for key in refused})
            raise self.in_config(refused, ", ".join(flags))
        new, peak = float(values["lr"]), self.peak()
        if not peak:
            raise SurgeryError(
                "the saved learning rate is 0, which no factor can change",
                next=f"relaunch the trainer with {self.options['lr']} {new:g}",
            )
        settings = [Setting("lr", p, p.value * (new / peak)) for p in self.locate("lr")]
        settings += [
            Setting("lr", p, scaled(p.value, new / peak)) for p in self.locate("initial_lr")
        ]
        bases = self._rates("base_lrs")
        for place in (*bases, *self._rates("_last_lr")):
            settings.append(Setting("lr", place, _each(place.value, new / peak)))
        if bases:
            return settings, []
        return settings, [
            Caveat(
                f"this version of {self.trainer} saves no base_lrs: the next step uses the new lr, "
                f"and from the one after it only {self.options['lr']} {new:g} does (where its "
                "config has optimizer.param_groups: the lr there)",
                "lr",
            )
        ]

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """The base rates of a saved LambdaLR become the rate of the next step; the shape is
        refused, with the options that make the trainer's own schedule of it."""
        rate = max((float(place.value) for place in self.locate("lr")), default=0.0)
        refuse_no_rate(rate)
        total = self.state().step + decay.steps
        shape = "sqrt" if decay.shape == "1-sqrt" else decay.shape
        words = (
            f"--training.steps {total} --lr_scheduler.decay_ratio {decay.steps / total!r} "
            f"--lr_scheduler.decay_type {shape} --lr_scheduler.min_lr_factor {decay.to / rate!r} "
            "--lr_scheduler.warmup_steps 0"
        )
        bases, share = self._rates("base_lrs"), rate / self.peak()
        if share == 1.0 or not bases:
            words += "" if share == 1.0 else f" {self.options['lr']} {rate!r}"
            raise SurgeryError(
                f"{self.trainer} computes the schedule from its own config at every step",
                next=f"relaunch the trainer with {words}",
            )
        rates = [place.value for place in self._rates("_last_lr")]
        rates = rates or [_each(place.value, share) for place in bases]
        settings = [Setting("lr", place, rate) for place, rate in zip(bases, rates, strict=True)]
        settings += [Setting("lr", p, scaled(p.value, share)) for p in self.locate("initial_lr")]
        return settings, [f"relaunch with {words}: the shape of the decay is in its config"]

    def peak(self) -> float:
        """What the schedule is a factor of."""
        bases = [place.value for place in self._rates("base_lrs")]
        rates = [r for base in bases for r in (base if isinstance(base, list) else [base])]
        rates = rates or [place.value for place in self.locate("initial_lr")]
        return float(max(rates or [place.value for place in self.locate("lr")]))

    def _rates(self, key: str) -> list[Place]:
        """A list of its LambdaLR's, or each of its numbers where rates are tensors."""
        name = f"lr_scheduler.{key}"
        return self.scalar(name) or self.listed(name)

    def next_rate(self) -> float:
        """The groups' own: a resume goes on with it before the schedule steps."""
        return float(self.agreed("lr")[0])

    def scheduler(self) -> str:
        """Its position: all else is in the config."""
        epochs = self.scalar("lr_scheduler.last_epoch")
        return f"at step {epochs[0].value} of a schedule in the config" if epochs else ""

    def notes(self) -> list[str]:
        """Also rates that differ."""
        rates = self.agreed("lr")
        differ = [f"parameters have different learning rates: {rates}"] if len(rates) > 1 else []
        return [*super().notes(), *differ]


def _each(rates: Any, factor: float) -> Any:
    """A rate times `factor`, or each of a list."""
    return [scaled(rate, factor) for rate in rates] if isinstance(rates, list) else rates * factor
