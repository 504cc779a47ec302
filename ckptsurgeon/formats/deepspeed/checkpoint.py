"""One saved step of a DeepSpeed run: what its fields mean, and what can be made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats.capabilities import (
    Converts,
    Cools,
    CountsMore,
    HasForms,
    HasHeads,
    HasMoreWeights,
    HasReplicas,
    HasWeights,
    NamesMoments,
    NumbersByRank,
    Rebatches,
    SkipsByFlag,
)
from ckptsurgeon.formats.checkpoint import Checkpoint, agree
from ckptsurgeon.formats.deepspeed import (
    experts,
    flags,
    fragments,
    openrlhf,
    optimizer,
    parallel,
    parts,
    precision,
    replicas,
    soundness,
    still,
    universal,
    weights,
)
from ckptsurgeon.formats.deepspeed.optimizer import Optimizer
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.fields import known_globals, skipped
from ckptsurgeon.formats.fields.understood import is_count, understood
from ckptsurgeon.formats.fields.values import (
    Conversion,
    Decay,
    Part,
    Place,
    Replica,
    Setting,
    State,
    Weight,
)
from ckptsurgeon.formats.heads import head_counts, heads
from ckptsurgeon.formats.heads.heads import Attention
from ckptsurgeon.formats.megatron import batch
from ckptsurgeon.formats.places.json_beside import transformers_config
from ckptsurgeon.formats.schedules import (
    annealing,
    deepspeed,
    neox,
    torch,
    torch_classes,
    torch_cooldown,
)
from ckptsurgeon.formats.schedules.check import AFTER_LOADING
from ckptsurgeon.formats.schedules.names import is_megatron
from ckptsurgeon.formats.schedules.rewarm import HOLD, factor, open_window, trained_after
from ckptsurgeon.plans.promise import Promise

BUNDLED = {"adamw": "AdamW", "sgdw": "SGDW"}
"""The bundled trainer's names for its optimizers → what people call them."""

COUNTERS: tuple[tuple[str, ...], ...] = (
    ("global_steps",), ("global_samples",), ("updates",), ("clipped_updates",),
    ("args", "gigaflos_no_embeds"),
)  # fmt: skip
"""Their paths in each model file."""
SHAPES = ("linear", "cosine")
"""Those of AnnealingLR's decay styles that end at min_lr."""


@dataclass
class DeepSpeedCheckpoint(
    DeepSpeedShards,
    Converts,
    Cools,
    CountsMore,
    HasForms,
    HasHeads,
    HasMoreWeights,
    HasReplicas,
    HasWeights,
    NamesMoments,
    NumbersByRank,
    Rebatches,
    SkipsByFlag,
):
    """One `global_step<N>`, and the universal copy beside it."""

    growth: ClassVar[Mapping[str, int]] = {"cur_iter": 0, "last_overflow_iter": -1}

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """By `initial_scale_power` of the saved config."""
        power = dict(self.config().get("fp16") or {}).get("initial_scale_power", 16)
        items = self._optimizers
        return [pair for i in items for pair in optimizer.scaler_start(self, i, power)]

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """By the family of the saved scheduler; lr alone where none is saved."""
        with understood(self.path):
            return self._reschedule(values)

    def _reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        schedule = self.schedule()
        if torch_classes.is_torch(schedule):
            return torch.reschedule(self, values)
        if deepspeed.is_deepspeed(schedule):
            return deepspeed.reschedule(self, self.config(), values)
        if self.neox:
            return neox.reschedule(self, schedule, values)
        if schedule is not None and not is_megatron(schedule):
            raise SurgeryError(
                "the class of the saved scheduler is not known, and neither is what it makes of "
                "an lr",
                next=AFTER_LOADING,
            )
        if schedule is not None and self.groups_win and not self.bundled:
            annealing.refuse_other_rule(self)
        settings, warnings = annealing.reschedule(self, values)
        if schedule is not None and self.megatron:
            warnings += flags.schedule_flags(self, settings)
        return settings, warnings

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """By the family of the saved scheduler."""
        with understood(self.path):
            schedule = self.schedule()
            if torch_classes.is_torch(schedule):
                return torch_cooldown.cooldown(self, decay)
            if deepspeed.is_deepspeed(schedule):
                return deepspeed.cooldown(self, decay)
            if self.neox:
                return neox.cooldown(self, schedule, decay)
            shapes = (*SHAPES, "1-sqrt") if self.bundled else SHAPES
            settings, warnings = annealing.cooldown(self, decay, shapes)
            if self.megatron:
                warnings += flags.schedule_flags(self, settings)
            return settings, warnings

    def conversion(self, to: str) -> Conversion:
        """See `precision`."""
        with understood(self.path):
            return precision.conversion(self, to)

    def rebatch(
        self, size: int | None, ramp: Sequence[int] | None, own_config: bool
    ) -> tuple[list[Setting], list[str]]:
        """Of the arguments of a trainer like Megatron's; DeepSpeed's config is never read back."""
        with understood(self.path):
            settings, notes = batch.rebatch(self, self.args(), size, ramp, own_config)
            return settings, [*notes, *(flags.rebatched(self) if settings else ())]

    def with_skipped(self, ranges: Sequence[skipped.Range], step: int) -> list[skipped.Range]:
        """By BigScience's --skip-train-iteration-range, of which the trainer drops what is past."""
        saved = skipped.of_pairs(self.args().get("skip_train_iteration_range"))
        return skipped.merge([*ranges, *skipped.ahead(saved, step)])

    def further_counters(self) -> list[tuple[str, Place]]:
        """The engine's own, those of the bundled trainer's log, and those of the loss scaler."""
        found = [(path[-1], place) for path in COUNTERS for place in self.in_models(*path)]
        for name in self.growth:
            places = (p for i in self._optimizers for p in optimizer.scaler(self, i, name))
            found += [(name, place) for place in places]
        return found

    def fragments(self, name: str) -> list[Part]:
        """See `fragments`."""
        return fragments.moments(self, name)

    def attention(self) -> tuple[list[Attention], list[str]]:
        """By Megatron's arguments, which the bundled trainer keeps as well; else by transformers'
        config in the step or beside it. Refused beside a universal copy, which has all ranks'
        heads."""
        if self.optimizers() != self._optimizers:
            parts.refuse_universal(self)
        args, name = self.args(), self.path.name
        if "num_attention_heads" in args:
            version = self.trees[self._models[0]].get("checkpoint_version") or 0
            if self.megatron and version < 2:  # before, fused rows were in another order
                raise head_counts.unknown(name, head_counts.OLD_ORDER)
            return heads.attentions(self.parts(), head_counts.of_megatron(args, name))
        config = transformers_config(self.path)
        if config is None:
            raise head_counts.unsaid(name, head_counts.CONFIG)
        return heads.attentions(self.parts(), head_counts.of_hugging_face(config, name))

    def parts(self) -> list[Part]:
        """See `parts`."""
        with understood(self.path):
            return parts.parts(self)

    def names_in(self, file: Path, order: Sequence[str]) -> list[str]:
        """See `experts`."""
        with understood(self.path):
            return experts.names_in(self, file, order)

    def all_parts(self) -> list[Part]:
        """See `still`."""
        return self.with_still(self.parts())

    def with_still(self, found: list[Part]) -> list[Part]:
        """The parts, and those that no update reaches."""
        with understood(self.path):
            return [*found, *still.still(self, found)]

    def replicas(self) -> list[Replica]:
        """See `replicas`."""
        return replicas.replicas(self)

    def weights(self) -> Iterator[Weight]:
        """See `weights`."""
        return weights.weights(self)

    def like(self, other: Checkpoint) -> Checkpoint:
        """Without shards, or without their universal copy, where `other` has only the one."""
        if not isinstance(other, DeepSpeedCheckpoint):
            return self
        wanted = {item.universal for item in other._optimizers}
        for converted in wanted - {item.universal for item in self._optimizers}:
            what = "a universal copy" if converted else "shards"
            raise SurgeryError(
                f"step {other.step} has {what}, and step {self.step} has none",
                next="move the copy out of the run, and convert the step again afterwards",
            )
        folder = universal.folder(self.folder.parent, self.step)
        gone = {path for path in self.archives if path.is_relative_to(folder) not in wanted}
        if not gone:
            return self
        return replace(
            self,
            trees={path: tree for path, tree in self.trees.items() if path not in gone},
            archives={path: each for path, each in self.archives.items() if path not in gone},
        )

    def known_parts(self) -> list[Part]:
        """Also what can be read and not edited."""
        with understood(self.path):
            return list(parts.stretches(self))

    def contradictions(self) -> list[str]:
        """See `soundness`."""
        return soundness.contradictions(self)

    # --- meaning ---------------------------------------------------------------------------------

    def _scheduler(self) -> tuple[str, float | None]:
        """A scheduler other than AnnealingLR in words, and the rate that it decays from."""
        schedule = self.schedule()
        if torch_classes.is_torch(schedule):
            peak = torch.peak(self) if self.locate("lr") else None
            return torch_classes.words(schedule), peak
        if deepspeed.is_deepspeed(schedule):
            config = self.config()
            words = deepspeed.words(schedule, config)
            return words, deepspeed.peak(config)
        if self.neox:
            return neox.words(schedule), float(schedule["start_lr"])
        if schedule is None:
            return "", max(self.rates(), default=None)
        return "" if is_megatron(schedule) else "an unknown schedule", None

    def read_state(self) -> State:
        """AnnealingLR's lr where the groups' is not used, times the share of an open window."""
        known: tuple[Any, dict[str, Any] | None] = None, None
        schedule, annealed = self.where_clear("scheduler", self._schedules, known)
        notes = known_globals.notes(self.globals())
        rates = self.rates()
        if len(set(rates)) > 1:
            notes.append(f"param groups have different learning rates: {rates}")
        lr = rates[0] if rates else None
        if annealed is not None and not self.groups_win:
            lr = annealing.learning_rate(annealed)
        if self.neox and not self.groups_win and "scheduler" not in self.unclear:
            lr = neox.learning_rate(schedule)
        if "scheduler" in self.unclear and not self.groups_win:
            lr, self.unclear["lr"] = None, self.unclear["scheduler"]
        notes += self._of_universal_copy()
        notes += openrlhf.notes(self.folder)
        notes += flags.notes(self) if self.megatron else ()
        if self.elastic:
            notes.append(
                "an elastic checkpoint keeps no param groups: betas, eps and weight decay are on "
                "the trainer's command line"
            )
        none: int | None = None
        iteration = self.where_clear("iteration", self._iteration, self.step)
        rewarm = self.clear("rewarm")
        now = annealed["num_steps"] if annealed else 0
        window = open_window(rewarm[0], now) if rewarm else ()
        promise = self.promise(iteration, None if lr is None else lr * factor(window, now))
        first = self.trees[self._models[0]]
        if torch_classes.is_torch(schedule):
            notes += torch_classes.notes(schedule)
        notes += deepspeed.notes(schedule, self.config())
        unclear: tuple[str, float | None] = "an unknown schedule", None
        scheduler, peak = self.where_clear("scheduler", self._scheduler, unclear)
        stage = self.where_clear("optimizer", lambda: str(self.stage()), "?")
        gigaflos = self.in_models("args", "gigaflos_no_embeds")
        state = State(
            step=iteration,
            promise=self._by_its_name(replace(promise, rewarm=window if rewarm else None)),
            schedule=annealed,
            dialect=f"deepspeed · zero {stage} · {parallel.sizes(first)}",
            data_parallel=int(first.get("dp_world_size", 1)),
            model_parallel=int(first.get("mp_world_size", 1)),
            dynamic_loss_scale=any(self._dynamic(item) for item in self._optimizers),
            tokens=self.where_clear("tokens", lambda: self._one("tokens"), none),
            gigaflos=float(gigaflos[0].value) if gigaflos else None,
            saved_at=max(self.archives[path].status.st_mtime for path in self._models),
            notes=tuple(notes),
            batch_size=self.where_clear("batch_size", self._batch_size, none),
            rampup=self.where_clear("rampup", self._rampup, None),
            peak_lr=peak,
            scheduler=scheduler,
        )
        after = trained_after(state, now, window[2]) if window and window[0] == HOLD else None
        if annealed is None or after is None:
            return state
        then = after[0], annealing.learning_rate({**annealed, "num_steps": after[1]})
        return replace(state, promise=replace(state.promise, then=then))

    def _schedules(self) -> tuple[Any, dict[str, Any] | None]:
        """The saved scheduler, and the same by AnnealingLR's names if it is one of Megatron's."""
        schedules = self.in_models("lr_scheduler")
        self.check("lr_scheduler", schedules, neox.problem if self.neox else annealing.problem)
        agree("lr_scheduler", schedules)
        return self.schedule(), self.annealed()

    def _iteration(self) -> int:
        counted = (self._one("iteration"), self._one("global_steps"), self.step)
        return next(int(count) for count in counted if count is not None)

    def _of_universal_copy(self) -> Iterator[str]:
        """What to know where there is one, and where another step's is still pointed to."""
        for item in self._optimizers:
            if item.universal and item.base:
                yield from universal.DEFECTS
        named = (text(self.folder.parent / universal.POINTER) or "").strip()
        own = self.folder.name.removesuffix(universal.SUFFIX) + universal.SUFFIX
        if named and named != own:
            yield (
                f"{universal.POINTER} names {named[:60]!r}, not this step: a relaunch "
                "with load_universal (--universal-checkpoint) starts there"
            )

    def _by_its_name(self, promise: Promise) -> Promise:
        """As the bundled trainer calls its optimizer: swapped, SGDW stands on groups that keep
        Adam's betas and eps, for the way back, and uses neither."""
        named = [str(name) for name in self.clear("optimizer")]
        if not named:
            return promise
        promise = replace(promise, optimizer=BUNDLED.get(named[0], named[0]))
        if named[0] != "sgdw":
            return promise
        return replace(promise, betas=None, eps=None, groups=None)

    def _batch_size(self) -> int | None:
        """Megatron's argument; of any other trainer, what the engine was configured with."""
        size = self._one("args", "global_batch_size")
        if size is not None or self.megatron:
            return size
        config = self.config()
        whole = config.get("train_batch_size")
        if whole is None:
            micro = config.get("train_micro_batch_size_per_gpu")
            accumulated = config.get("gradient_accumulation_steps", 1)
            factors = [micro, accumulated, self._one("dp_world_size")]
            whole = math.prod(factors) if all(map(is_count, factors)) else None
        return int(whole) if is_count(whole) and whole else None

    def _rampup(self) -> tuple[int, int, int] | None:
        places = self.in_models("args", "rampup_batch_size")
        numbers = [int(number) for number in places[0].value or ()] if places else []
        return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None

    def _dynamic(self, item: Optimizer) -> bool:
        flags = optimizer.scaler(self, item, "dynamic") + self.at(
            item.file, (*item.outer, "dynamic_loss_scale")
        )
        return any(bool(place.value) for place in flags)

    def _one(self, *path: str) -> int | None:
        places = self.in_models(*path)
        self.check(path[-1], places)
        agree(path[-1], places)
        return int(places[0].value) if places else None
