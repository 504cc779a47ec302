"""One saved step of a Megatron-LM run: what its fields mean, and what can be made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ckptsurgeon.errors import NotUnderstood, SurgeryError, count
from ckptsurgeon.formats.capabilities import (
    AdjustsGroups,
    BoundToRanks,
    Cools,
    HasHeads,
    NamesMoments,
    NumbersByRank,
    Rebatches,
    SkipsByFlag,
)
from ckptsurgeon.formats.fields import known_globals, skipped
from ckptsurgeon.formats.fields.understood import is_count, understood
from ckptsurgeon.formats.fields.values import NUMBER, Decay, Part, Place, Setting, State
from ckptsurgeon.formats.heads import head_counts, heads
from ckptsurgeon.formats.heads.heads import Attention
from ckptsurgeon.formats.megatron import arguments, batch, flags, identity, parts, soundness
from ckptsurgeon.formats.megatron.shards import MegatronShards
from ckptsurgeon.formats.optimizers.param_groups import epsilon
from ckptsurgeon.formats.schedules import megatron, names
from ckptsurgeon.formats.schedules.annealing import present_rate
from ckptsurgeon.formats.schedules.check import samples_of
from ckptsurgeon.formats.schedules.megatron import in_proportion, multiplier
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import AnyChange

Self = TypeVar("Self", bound="MegatronCheckpoint")
NOTHING: Mapping[str, Any] = {}
AXES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}


@dataclass
class MegatronCheckpoint(
    MegatronShards,
    AdjustsGroups,
    BoundToRanks,
    Cools,
    HasHeads,
    NamesMoments,
    NumbersByRank,
    Rebatches,
    SkipsByFlag,
):
    """One `iter_<N>` of the legacy format: `mp_rank_*/model_optim_rng.pt`, `distrib_optim.pt`."""

    sharded: ClassVar[bool] = False
    """Whether tensors are whole, in chunks at offsets, and not those of each rank."""

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """`--initial-loss-scale` and `--hysteresis` of the saved args, or their defaults."""
        args = self.args()
        start = {
            "scale": float(args.get("initial_loss_scale") or 2**32),
            "growth_tracker": 0,
            "hysteresis_tracker": int(args.get("hysteresis") or 2),
        }
        return [
            (place, value)
            for item in self._optimizers
            for name, value in start.items()
            for place in self.at(item.file, (*item.scaler, name))
        ]

    # --- the schedule ----------------------------------------------------------------------------

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """New values in the scheduler's state and in the groups' own `max_lr` and `min_lr`, which
        win; all groups keep their proportions, as the trainer makes them (µP, --decoupled-lr)."""
        with understood(self.path):
            return self._reschedule(values)

    def _reschedule(
        self, values: Mapping[str, Any], last_decay: Mapping[str, Any] = NOTHING
    ) -> tuple[list[Setting], list[str]]:
        """`last_decay` are the parameters of a new WSD, which only the args keep."""
        schedule = self.schedule()
        if schedule is None:
            if set(values) != {"lr"}:
                raise SurgeryError(
                    "the checkpoint keeps no scheduler, so only lr has a place",
                    next="set the schedule on the trainer's command line",
                )
            return [Setting("lr", p, values["lr"]) for p in self.locate("lr")], []
        for name in soundness.SCHEDULE:
            self.locate(name)  # all of it is computed with
        settings: list[Setting] = []
        warnings: list[str] = []
        new = dict(schedule)
        own: dict[str, Any] = {}
        for key, value in values.items():
            field = "max_lr" if key == "lr" else key
            new[names.key(schedule, field) or field] = value
            old = names.value(schedule, field)
            for place in self.locate(field):
                if field in ("max_lr", "min_lr") and place.wins and place.value != old:
                    settings.append(Setting(key, place, in_proportion(place.value, old, value)))
                    continue
                settings.append(Setting(key, place, value))
            if field in ("max_lr", "min_lr"):
                own[field] = (old, value)
        megatron.check(new, names.value(new, "max_lr"), names.value(new, "min_lr"))
        unsaved = arguments.unsaved(self.args())
        for place in self.locate("lr"):
            group = dict(self.group_around(place))
            before = self.rate(group)
            plain = megatron.learning_rate(schedule, group, unsaved)
            for field, (old, value) in own.items():
                if field in group:
                    group[field] = in_proportion(group[field], old, value)
            after = megatron.learning_rate(new, group, {**unsaved, **last_decay})
            settings.append(Setting("lr", place, after * (before / plain if plain else 1.0)))
        now, warmup = (names.value(new, key) for key in ("position", "warmup"))
        if now < warmup:
            warnings.append(f"still warming up: sample {now} of {warmup}")
        return settings, warnings

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """From here on in one of the scheduler's own styles; 1-sqrt is WSD's minus_sqrt, whose
        length and style are on the command line. All groups keep their proportions."""
        with understood(self.path):
            self.state().needed("scheduler")
            present = self.state().schedule
            if present is None:
                raise SurgeryError(
                    "the checkpoint keeps no scheduler, so nothing in it can make the rate decay",
                    next="set the schedule on the trainer's command line",
                )
            now, samples = present["num_steps"], samples_of(decay)
            rate = megatron.learning_rate(present, {}, arguments.unsaved(self.args()))
            values = {
                "lr": present_rate(rate, float(present["max_lr"])),
                "min_lr": decay.to,
                "decay": now + samples,
                "decay_style": decay.shape,
                "warmup": now,
            }
            if decay.shape != "1-sqrt":
                return self.reschedule(values)
            unit, count = arguments.last_decay(self.args(), samples)
            values |= {"decay_style": "WSD", "warmup": min(now, present["warmup_steps"])}
            saved = {"lr_wsd_decay_style": "minus_sqrt", f"lr_wsd_decay_{unit}": count}
            new = {"lr_wsd_decay_style": "minus_sqrt", "wsd_decay_steps": samples}
            settings, warnings = self._reschedule(values, new)
            for name, value in saved.items():
                settings += [Setting("decay", p, value) for p in self.in_roots("args", name)]
            words = f"--lr-wsd-decay-style minus_sqrt --lr-wsd-decay-{unit} {count}"
            return settings, [*warnings, f"relaunch also with {words}: only the flags say so"]

    def rebatch(
        self, size: int | None, ramp: Sequence[int] | None, own_config: bool
    ) -> tuple[list[Setting], list[str]]:
        """See `batch`."""
        with understood(self.path):
            return batch.rebatch(self, self.args(), size, ramp, own_config)

    def with_skipped(self, ranges: Sequence[skipped.Range], step: int) -> list[skipped.Range]:
        """By --iterations-to-skip, which counts all."""
        saved = skipped.of_numbers(self.args().get("iterations_to_skip"))
        return skipped.merge([*ranges, *skipped.ahead(saved, step)])

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """µP makes the eps of a hidden group from --adam-eps, as it makes its rate from --lr; the
        scheduler gives each group its share of one weight decay."""
        of_group = str(place.path[-1]).rpartition(".")[2] == "weight_decay"
        if key == "weight_decay" and of_group and self.schedule() is not None:
            with understood(place.file):
                return value * multiplier(self.group_around(place))
        if key != "eps":
            return value
        main = self.all_groups()[self.main()].get("eps")
        return in_proportion(place.value, main, value) if isinstance(main, float) else value

    def multiplied(self) -> bool:
        """Where the scheduler has one weight decay, and no group a `start_wd` of its own."""
        groups = self.all_groups() if self.schedule() is not None else []
        own = any(group.get("start_wd") is not None for group in groups)
        said = [not megatron.MULTIPLIERS.isdisjoint(group) for group in groups]
        return bool(groups) and all(said) and not own

    # --- elements --------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """See `parts`."""
        with understood(self.path):
            return parts.parts(self)

    def names_in(self, file: Path, order: Sequence[str]) -> list[str]:
        """Raises SurgeryError for several optimizers or ranks, each of which begins at 0."""
        if len(self._optimizers) > 1:
            raise parts.unknown(
                file,
                "which of its numbers are whose: each of "
                f"{count(len(self._optimizers), 'optimizer')} begins at 0",
            )
        return list(order)

    def architecture(self) -> Mapping[str, Any]:
        """What is saved of the model's shape, by the names of Megatron-core's config."""
        return self.args()

    def attention(self) -> tuple[list[Attention], list[str]]:
        """By the arguments. Refused for fused rows of another order, as releases before 2.0 saved
        them, and for expert ranks, each of which has the attention once more."""
        saved, name = self.architecture(), self.path.name
        if "num_attention_heads" not in saved:
            raise head_counts.unsaid(name)
        versions = [place.value for place in self.in_roots("checkpoint_version")]
        if any((version or 0) < 2 for version in versions):
            raise head_counts.unknown(name, head_counts.OLD_ORDER)
        if not self.sharded and int(saved.get("expert_model_parallel_size") or 1) > 1:
            raise head_counts.unknown(name, "each expert rank has its attention once more")
        model = head_counts.of_megatron(saved, name)
        return heads.attentions(self.parts(), model, chunked=self.sharded)

    def loads_on(self) -> Mapping[str, int]:
        """On the tensor and pipeline ranks of the arguments, which the loader compares."""
        saved = self.architecture()
        sizes = {name: saved.get(option) for name, option in AXES.items()}
        return {name: size for name, size in sizes.items() if is_count(size) and size}

    def fragments(self, name: str) -> list[Part]:
        """Of `parts`, where these have names. Refused for what they do not have."""
        found = [part for part in self.parts() if part.kind == name]
        if not found or any(part.parameter.startswith(NUMBER) for part in found):
            raise NamesMoments.lacking(self)
        return found

    # --- meaning ---------------------------------------------------------------------------------

    def after(self: Self, changes: Sequence[AnyChange], root: Path) -> Self:
        """Raises SurgeryError where two param groups would become one to the loader."""
        new = super().after(changes, root)
        pairs = zip(self._optimizers, new._optimizers, strict=True)
        for before, item in pairs if self.found_by_settings else ():
            try:
                known = identity.twins(self.groups(before))
            except NotUnderstood:  # nothing of them is changed: who needs them has refused
                continue
            made = [pair for pair in identity.twins(new.groups(item)) if pair not in known]
            if made:
                raise SurgeryError(
                    f"param groups {made[0][0]} and {made[0][1]} would have the same "
                    f"{', '.join(identity.differing(self.groups(before), made[0]))}, by which the "
                    "trainer tells them apart: it would load both from the last one",
                    next=command(
                        "show", why="the param groups: take a value that keeps them apart"
                    ),
                )
        return new

    def contradictions(self) -> list[str]:
        """See `soundness`."""
        return soundness.contradictions(self)

    def read_state(self) -> State:
        """Of the main param group: the rates and weight decays that the scheduler will write."""
        schedule, args = self.schedule(), self.args()
        groups = self.all_groups()
        if not groups:
            for error in self.odd:
                raise error
            raise SurgeryError(
                f"{self.path.name} keeps no optimizer (saved with --no-save-optim)",
                next=command("status", why="a step that has one"),
            )
        for name in (*soundness.SCHEDULE, "lr", "weight_decay"):
            self.clear(name)
        floats: list[float] = []
        if odd := next(
            (self.unclear[name] for name in soundness.SCHEDULE if name in self.unclear), ""
        ):
            self.unclear["lr"] = self.unclear["scheduler"] = odd
        rates = floats
        if not odd:
            rates = self.where_clear("lr", lambda: [self.rate(group) for group in groups], rates)
        decays = self.where_clear("weight_decay", lambda: [*map(self._decay, groups)], floats)
        iteration = self.clear("iteration")
        step = int(iteration[0]) if iteration else self.step
        main = self.main()
        none: tuple[tuple[int, int], ...] = ()
        steps = self.where_clear("batch_size", lambda: arguments.sizes(args), none)
        size = None if args.get("step_batch_size_schedule") else args.get("global_batch_size")
        size = steps[-1][1] if steps else size
        notes = known_globals.notes(self.shallow_globals())
        notes += self.where_clear("scheduler", lambda: [*flags.notes(self, main)], [])
        promise = self.promise(step, rates[main] if rates else None)
        eps = promise.eps
        if "eps" not in self.unclear:
            eps = epsilon(groups[main].get("eps", eps))  # µP has others in hidden layers
        named: Mapping[str, Any] | None = None
        if schedule is not None and not odd:
            plain = partial(arguments.plain, schedule, groups[main])
            named = self.where_clear("scheduler", plain, named)
        return State(
            step=step,
            promise=replace(promise, weight_decay=tuple(decays) or None, eps=eps),
            schedule=named,
            dialect=self.dialect(),
            data_parallel=int(args.get("data_parallel_size") or 1),
            model_parallel=len(self._roots),
            dynamic_loss_scale=bool(self.clear("loss_scale")),
            tokens=None,
            gigaflos=None,
            saved_at=max(file.stat().st_mtime for file, _ in self._roots),
            notes=tuple(notes),
            batch_size=size if isinstance(size, int) else None,
            rampup=self.where_clear("rampup", lambda: arguments.rampup(args), None),
            sizes=steps,
            data=arguments.data(args, self.pending()),
        )

    def dialect(self) -> str:
        """What kind of checkpoint this is, in a few words."""
        kind = "distributed optimizer" if self.args().get("use_distributed_optimizer") else "torch"
        return f"megatron-lm · legacy · {kind} · mp {len(self._roots)}"

    def shallow_globals(self) -> Mapping[str, frozenset[str]]:
        """Those of what is read for `state` anyway."""
        return self.globals()

    def _decay(self, group: Mapping[str, Any]) -> float:
        schedule = self.schedule()
        if schedule is None or "wd_incr_style" not in schedule:
            return float(group["weight_decay"])
        return megatron.weight_decay(schedule, group)
