"""One saved step of OLMo-core: its optimizer, the counters of each rank, and what the config says.

Source: `olmo_core/train/{trainer,checkpoint}.py`, `data/data_loader.py`, `optim/config.py`, 3.0.0.
Whether a scheduler sets the rates is in no checkpoint: `config.json` beside it says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.capabilities import HasHeads, SkipsByFlag
from ckptsurgeon.formats.dcp.checkpoint import DcpCheckpoint, scaled
from ckptsurgeon.formats.fields import skipped
from ckptsurgeon.formats.fields.understood import mapping
from ckptsurgeon.formats.fields.values import Decay, Place, Setting
from ckptsurgeon.formats.heads import head_counts, heads
from ckptsurgeon.formats.heads.heads import Attention
from ckptsurgeon.formats.schedules import olmo_core
from ckptsurgeon.hints import command
from ckptsurgeon.plans.promise import Caveat

FIXED = ("initial_lr",)
"""Keys of the param groups that a load takes from the config, where it names no others."""
BATCHES, TOKENS = ("data_loader", "batches_processed"), ("data_loader", "tokens_processed")


@dataclass
class OlmoCoreCheckpoint(DcpCheckpoint, HasHeads, SkipsByFlag):
    """`config` is what the run was last started with, empty where the step has none; `ephemeral`
    whether the trainer removes the step once it has saved another."""

    config: Mapping[str, Any] = field(kw_only=True, default_factory=dict)
    ephemeral: bool = field(kw_only=True, default=False)

    named_by_folder: ClassVar[bool] = True
    counters: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "iteration": ("global_step",),
        "tokens": ("global_train_tokens_seen",),
        "seed": ("data_loader", "seed"),
        "data_epoch": ("data_loader", "epoch"),
        "data_batches": BATCHES,
        "data_tokens": TOKENS,
    }

    def counted(self, field: str) -> list[Place]:
        """In the file of every rank, the epoch twice: the loader begins anew by the trainer's."""
        paths = [self.counters[field], *([("epoch",)] if field == "data_epoch" else [])]
        return [place for file in self.archives for path in paths for place in self.at(file, path)]

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """The tokens of the epoch move with its batches: a load computes one from the other."""
        settings, _ = super().recount(counter, value)
        places, batches = self.locate("data_tokens"), self.locate("data_batches")
        if counter in ("iteration", "tokens") and batches:
            now = batches[0].value
            return settings, [f"the data goes on at batch {now} unless data_batches is set too"]
        if counter != "data_batches" or not places:
            return settings, []
        size = self._batch_tokens()
        if size is None:
            raise SurgeryError(
                f"{self.path.name} does not say how many tokens a batch has, and its trainer "
                "computes the next batch from the tokens",
                next="put the run's config.json into the step's folder and repeat",
            )
        tokens = [Setting("data_tokens", place, value * size) for place in places]
        return [*settings, *tokens], []

    # --- the config ------------------------------------------------------------------------------

    @property
    def _module(self) -> Mapping[str, Any]:
        return mapping(self.config.get("train_module"))

    @property
    def _fixed(self) -> tuple[str, ...]:
        names = mapping(self._module.get("optim")).get("fixed_fields")
        return tuple(map(str, names)) if isinstance(names, (list, tuple)) else FIXED

    @property
    def _schedule(self) -> Mapping[str, Any]:
        """The scheduler of the config; empty where the config has none, or is not there."""
        return mapping(self._module.get("scheduler"))

    def _batch_tokens(self) -> int | None:
        size = mapping(self.config.get("data_loader")).get("global_batch_size")
        if isinstance(size, int) and size > 0:
            return size
        batches = [p.value for file in self.archives for p in self.at(file, BATCHES)]
        tokens = [p.value for file in self.archives for p in self.at(file, TOKENS)]
        if batches and tokens and batches[0] and tokens[0] % batches[0] == 0:
            return int(tokens[0] // batches[0])
        return None

    def wins(self, field: str) -> bool:
        """All but what the config fixes, and the lr where a scheduler may write it."""
        free = field != "lr" or (bool(self._module) and not self._schedule)
        return free and field not in self._fixed

    def attention(self) -> tuple[list[Attention], list[str]]:
        """By the model of the config, which the run's folder or the step's has."""
        if not self.config:
            raise head_counts.unsaid(self.path.name)
        model = head_counts.of_olmo_core(self.config, self.path.name)
        return heads.attentions(self.parts(), model, chunked=True)

    # --- the schedule ----------------------------------------------------------------------------

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """Refused with the option that does it: OverrideDecay of `olmo_core/optim/scheduler.py`,
        which composable and sequential schedulers have, in two shapes."""
        if decay.shape not in ("linear", "cosine"):
            raise SurgeryError(
                f"OLMo-core has no decay of the shape {decay.shape}",
                next=command(
                    "cooldown", "--shape", "linear", why="its shapes are linear and cosine"
                ),
            )
        start = self.state().step + 1
        override = f"start: {start}, duration: {decay.steps}, shape: {decay.shape}"
        raise SurgeryError(
            f"{self.trainer} computes the rate from its config before every step",
            next=(
                "relaunch the trainer with --train_module.scheduler.override_decay="
                f"'{{{override}, end_lr: {decay.to!r}}}'    of a composable or sequential scheduler"
            ),
        )

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """The groups' lr, all by one factor, where the run has no scheduler.

        Raises SurgeryError for all else: the config decides it."""
        flags = self.flags(values)
        if set(values) == {"lr"} and not self._module:
            raise SurgeryError(
                f"{self.path.name} has no config.json, so whether a scheduler sets the lr at every "
                "step is not known",
                next=(
                    "put the run's config.json into the step's folder and repeat",
                    f"or, if it has a scheduler, relaunch the trainer with {flags}",
                ),
            )
        if set(values) != {"lr"} or self._schedule or "lr" in self._fixed:
            raise self.in_config(values, flags)
        new, peak = float(values["lr"]), self.peak()
        if not peak:
            raise SurgeryError(
                "the saved learning rate is 0, which no factor can change",
                next=f"relaunch the trainer with {flags} and a scheduler",
            )
        places = self.locate("lr")
        return [Setting("lr", p, scaled(p.value, new / peak)) for p in places], [
            f"{self.trainer} has no scheduler in this run: the lr of the checkpoint holds until "
            f"another surgery, and {self.options['lr']} is not read after a load"
        ]

    def flags(self, values: Mapping[str, Any]) -> str:
        """The options that decide these parts of the schedule: of its rate with the value."""
        flags = {
            f"{self.options[key]}={value:g}" if key == "lr" else self.options[key]
            for key, value in values.items()
        }
        return ", ".join(sorted(flags))

    def peak(self) -> float | None:
        """The largest rate of a group; of a schedule, the rate that it is computed from."""
        rates = [p.value for p in self.locate("initial_lr")] if self._schedule else []
        rates = rates or [place.value for place in self.locate("lr")]
        return max((float(rate) for rate in rates if rate is not None), default=None)

    def next_rate(self) -> float | None:
        """Of the next update that the config does not leave out."""
        if not self._module:
            return None
        if not self._schedule:
            return float(self.agreed("lr")[0])
        bases = self.agreed("initial_lr") or [mapping(self._module.get("optim")).get("lr")]
        try:
            now, end = self._where()
            return olmo_core.rate(self._schedule, float(bases[0]), now, end)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return None

    def _where(self) -> tuple[int, int]:
        """Where the schedule stands at the next update and ends, in its units. Raises TypeError or
        ValueError where the config and the counters do not say."""
        (step,), steps = self.agreed("iteration"), self._steps()
        past = 1
        while self._left_out(step + past):
            past += 1
        if self._schedule.get("units", "steps") != "tokens":
            return step + past, steps
        callbacks = mapping(mapping(self.config.get("trainer")).get("callbacks")).values()
        names = [str(mapping(each).get("_CLASS_")) for each in callbacks]
        if any("Scheduler" in name for name in names):  # of the size of a batch, or of sequences
            raise ValueError("a batch has no fixed size")
        (seen,), size = self.agreed("tokens"), self._batch_tokens()
        duration = mapping(mapping(self.config.get("trainer")).get("max_duration"))
        if size is None:
            raise ValueError("the size of a batch is not known")
        tokens = duration.get("value") if duration.get("unit") == "tokens" else None
        return seen + past * size, int(tokens or seen + (steps - step) * size)

    def _steps(self) -> int:
        """Where the run ends: the config where that says so in steps, else what was saved."""
        duration = mapping(mapping(self.config.get("trainer")).get("max_duration"))
        if duration.get("unit") == "steps":
            return int(duration["value"])
        saved = [self.value(file, ("max_steps",)) for file in self.archives]
        return int(saved[0])

    def _left_out(self, step: int) -> bool:
        """Whether the config's `steps_to_skip` has it: start included, stop not."""
        ranges = mapping(self.config.get("trainer")).get("steps_to_skip") or ()
        return any(int(each["start"]) <= step < int(each["stop"]) for each in ranges)

    def with_skipped(self, ranges: Sequence[skipped.Range], step: int) -> list[skipped.Range]:
        """By the config's `steps_to_skip`."""
        found = mapping(self.config.get("trainer")).get("steps_to_skip") or ()
        saved = [(int(each["start"]), int(each["stop"]) - 1) for each in found]
        return skipped.merge([*ranges, *skipped.ahead(saved, step)])

    def scheduler(self) -> str:
        """By its class, or why there is none."""
        if not self._module:
            return "no config.json says whether a scheduler sets it"
        return olmo_core.words(self._schedule) if self._schedule else "no scheduler: it holds"

    def notes(self) -> list[str]:
        """What the config takes out of the checkpoint's hands, and what the trainer removes."""
        notes = super().notes()
        if not self._module:
            text = "the lr of the next step is not known: the step has no config.json"
            notes.append(Caveat(text, "lr", known=False))
        elif self._schedule and self.next_rate() is None:
            text = "the lr of the next step is not known: its scheduler is none known here"
            notes.append(Caveat(text, "lr", known=False))
        elif self._schedule:
            notes.append(
                f"the lr is computed from {self.options['lr']} and {self.options['warmup']} of "
                "config.json: a relaunch with another config computes another"
            )
        fixed = [name for name in self._fixed if name not in FIXED]
        if fixed:
            notes.append(
                f"the config decides {', '.join(fixed)} (train_module.optim.fixed_fields): what "
                "the checkpoint holds of it is replaced at every load"
            )
        if self._ranges():
            notes.append(f"the run was started with trainer.steps_to_skip={self._ranges()}")
        if self.ephemeral:
            notes.append(
                "this step is ephemeral: its trainer removes it once the next one is saved"
            )
        return notes

    def _ranges(self) -> list[str]:
        ranges = mapping(self.config.get("trainer")).get("steps_to_skip") or ()
        return [f"{mapping(r).get('start')}:{mapping(r).get('stop')}" for r in ranges]
