"""One saved step of a Megatron-LM run: where each field is kept, and what it means.

Legacy and torch_dist checkpoints hold the same state: a **root** is a place that has it, once a
model-parallel rank in the one, once in all in the other (megatron_dist.py). Source of what wins on
load: `megatron/training/checkpointing.py`, `megatron/core/optimizer{,_param_scheduler}.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

from ckptsurgeon.edits import Key, Promise
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor, get, tensors
from ckptsurgeon.formats import Place, Setting, State, known_globals
from ckptsurgeon.formats.checkpoint import Shards, agree
from ckptsurgeon.formats.megatron import flags
from ckptsurgeon.formats.moments import ALL
from ckptsurgeon.formats.moments import places as in_state
from ckptsurgeon.formats.sane import UnknownField, understood
from ckptsurgeon.formats.schedules import megatron
from ckptsurgeon.formats.schedules.megatron import is_param_scheduler

ARGS = {
    "consumed_samples": "consumed_train_samples",
    "clip_grad": "clip_grad",
    "seed": "seed",
}
"""Field → its name in the saved args; only the first is read back."""
SCHEDULE = ("max_lr", "min_lr", "warmup", "decay", "decay_style", "num_steps")
RECIPE = {"lr": "max_lr", "position": "num_steps"}
"""Recipe key → field of the schedule, where they differ."""
GROUP = ("lr", "betas", "eps", "initial_lr")


class Optimizer(NamedTuple):
    """One optimizer of a chain: `base` leads to its param groups and their state, `scaler` to what
    its gradient scaler saved."""

    file: Path
    base: tuple[Key, ...]
    scaler: tuple[Key, ...]


@dataclass
class MegatronCheckpoint(Shards):
    """One `iter_<N>` of the legacy format: `mp_rank_*/model_optim_rng.pt`, `distrib_optim.pt`."""

    def __post_init__(self) -> None:
        self._places: dict[str, list[Place]] = {}
        self._state: State | None = None
        with understood(self.path):
            self._roots = list(self.find_roots())
            if not self._roots:
                raise SurgeryError(
                    f"{self.path.name} holds no state of Megatron-LM",
                    next="ckptsurgeon status    list the complete steps",
                )
            self._optimizers = list(self.find_optimizers())

    # --- where things are ------------------------------------------------------------------------

    def find_roots(self) -> Iterator[tuple[Path, tuple[Key, ...]]]:
        """File and path of each dict with `args`, `iteration` and the scheduler's state."""
        for path in self.trees:
            if path.name == "model_optim_rng.pt":
                yield path, ()

    def find_optimizers(self) -> Iterator[Optimizer]:
        """Those in the roots, and the files of a layer-wise optimizer."""
        for file, prefix in self._roots:
            yield from self.chain(file, (*prefix, "optimizer"))
        for path in self.trees:
            if path.name.startswith("layer_wise_optimizer_"):
                yield from self.chain(path, ())

    def chain(self, file: Path, path: tuple[Key, ...]) -> Iterator[Optimizer]:
        """The optimizers under `path`: one, or a list of several."""
        try:
            held = get(self.trees[file], path)
        except KeyError:
            return
        if isinstance(held, Mapping) and "param_groups" in held:
            yield Optimizer(file, path, (*path, "grad_scaler"))
        elif isinstance(held, Mapping) and "optimizer" in held:
            yield Optimizer(file, (*path, "optimizer"), (*path, "grad_scaler"))
        elif isinstance(held, (list, tuple)):
            for i in range(len(held)):
                yield from self.chain(file, (*path, i))
        elif isinstance(held, Mapping):  # torch_dist numbers them
            for key in held:
                if isinstance(key, int):
                    yield from self.chain(file, (*path, key))

    def groups(self, item: Optimizer) -> list[Mapping[str, Any]]:
        """Its param groups; none when they are kept elsewhere."""
        try:
            found = get(self.trees[item.file], (*item.base, "param_groups"))
        except KeyError:
            return []
        return [group for group in found if isinstance(group, Mapping)]

    def in_roots(self, *path: Key, wins: bool = True) -> list[Place]:
        """`path` in every root."""
        return [p for file, prefix in self._roots for p in self.at(file, (*prefix, *path), wins)]

    def _in_groups(self, name: str, wins: bool) -> list[Place]:
        return [
            place
            for item in self._optimizers
            for i in range(len(self.groups(item)))
            for place in self.at(item.file, (*item.base, "param_groups", i, name), wins)
            if place.value is not None
        ]

    def schedule(self) -> Mapping[str, Any] | None:
        """The state of the OptimizerParamScheduler in the first root."""
        file, prefix = self._roots[0]
        for name in ("lr_scheduler", "opt_param_scheduler"):
            try:
                found = get(self.trees[file], (*prefix, name))
            except KeyError:
                continue
            if is_param_scheduler(found):
                return found  # type: ignore[no-any-return]
        return None

    def schedule_places(self, field: str, wins: bool = True) -> list[Place]:
        """A key of the scheduler's state in every root; `field` as in `megatron_scheduler`."""
        names = megatron.ALIASES.get(field, (field,))
        return [
            place
            for outer in ("lr_scheduler", "opt_param_scheduler")
            for name in names
            for place in self.in_roots(outer, name, wins=wins)
        ]

    # --- places ----------------------------------------------------------------------------------

    def locate(self, name: str) -> list[Place]:
        """Every place of `name`: a recipe key, or a field of the schedule."""
        if name not in self._places:
            with understood(self.path):
                self._places[name] = self._locate(name)
            self.check(name, self._places[name])
        return self._places[name]

    def _locate(self, name: str) -> list[Place]:
        if name in ("max_lr", "min_lr"):
            own = self._in_groups(name, wins=True)
            return own + self.schedule_places(name, wins=not own)
        if name in SCHEDULE or name == "position":
            return self.schedule_places(RECIPE.get(name, name))
        if name == "weight_decay":
            held = [self._in_groups(key, wins=True) for key in ("start_wd", "end_wd")]
            kept = [p for key in ("start_wd", "end_wd") for p in self.schedule_places(key)]
            copies = self._in_groups(name, wins=not kept and not any(held))
            return [*kept, *held[0], *held[1], *copies]
        if name in GROUP:
            return self._in_groups(name, wins=name != "lr" or self.schedule() is None)
        if name == "adam_step":
            return self._steps()
        if name == "group_step":
            return []
        if name in ALL:
            return self.moments(name)
        if name in ARGS:
            return self.in_roots("args", ARGS[name], wins=name == "consumed_samples")
        if name == "iteration":
            return self.in_roots(name) + self.in_roots("args", name, wins=False)
        if name == "loss_scale":
            found = (self.at(item.file, (*item.scaler, "scale")) for item in self._optimizers)
            return [place for places in found for place in places]
        if name in ("skip", "tokens", "rewarm", "scheduler", "skipped_steps"):
            return []
        raise UnknownField(name)

    def _steps(self) -> list[Place]:
        out = self._in_groups("step", wins=True)
        for item in self._optimizers:
            try:
                state = get(self.trees[item.file], (*item.base, "state"))
            except KeyError:
                continue
            out += self.at(item.file, (*item.base, "state", "common_step"))
            for key, held in state.items():
                if isinstance(held, Mapping) and "step" in held:
                    out += self.at(item.file, (*item.base, "state", key, "step"))
        return out

    def moments(self, name: str) -> list[Place]:
        """Every tensor of one moment, in any shard; in `distrib_optim.pt` a key is a pair of
        dtypes, which a path names by its text."""
        found = [
            Place(file, tuple(k if isinstance(k, (str, int)) else repr(k) for k in path), tensor)
            for file, tree in self.trees.items()
            for path, tensor in tensors(tree)
            if path and path[-1] == name
        ]
        for item in self._optimizers:
            path = (*item.base, "state")
            states = self.value(item.file, path)
            for key, held in states.items() if isinstance(states, Mapping) else ():
                if isinstance(held, Mapping) and name not in held:  # quantized
                    found += in_state(self, item.file, (*path, key), held, name)
        return found

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

    def args(self) -> Mapping[str, Any]:
        """The saved command line of the first root."""
        file, prefix = self._roots[0]
        found = self.at(file, (*prefix, "args"))
        held = getattr(found[0].value, "state", None) if found else None
        return held if isinstance(held, dict) else {}

    # --- the schedule ----------------------------------------------------------------------------

    def rate(self, group: Mapping[str, Any]) -> float:
        """The lr that the scheduler gives to a param group at the saved position.

        Some versions multiply it by the group's `lr_mult`: the saved lr shows which."""
        schedule = self.schedule()
        if schedule is None:
            return float(group["lr"])
        lr = megatron.learning_rate(schedule, group, flags.unsaved(self.args()))
        mult, saved = group.get("lr_mult", 1.0), group.get("lr")
        if isinstance(saved, (int, float)) and isinstance(mult, (int, float)):
            scaled = isclose(saved, lr * mult, rel_tol=1e-9)
            return lr * mult if scaled and not isclose(saved, lr, rel_tol=1e-9) else lr
        return lr

    def reschedule(self, wanted: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """New values in the scheduler's state and in the groups' own `max_lr` and `min_lr`, which
        win; a group that had another peak than the scheduler (--decoupled-lr) keeps it."""
        with understood(self.path):
            return self._reschedule(wanted)

    def _reschedule(self, wanted: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        schedule = self.schedule()
        if schedule is None:
            if set(wanted) != {"lr"}:
                raise SurgeryError(
                    "the checkpoint keeps no scheduler, so only lr has a place",
                    next="set the schedule on the trainer's command line",
                )
            return [Setting("lr", p, wanted["lr"]) for p in self.locate("lr")], []
        settings: list[Setting] = []
        warnings: list[str] = []
        new = dict(schedule)
        own: dict[str, Any] = {}
        for key, value in wanted.items():
            field = RECIPE.get(key, key)
            new[megatron.key(schedule, field) or field] = value
            old = megatron.value(schedule, field)
            for place in self.locate(field):
                if field in ("max_lr", "min_lr") and place.wins and place.value != old:
                    told = f"a param group has its own {field} {place.value:g} and keeps it"
                    warnings += [told] if told not in warnings else []
                    continue
                settings.append(Setting(key, place, value))
            if field in ("max_lr", "min_lr"):
                own[field] = (old, value)
        megatron.check(new, megatron.value(new, "max_lr"), megatron.value(new, "min_lr"))
        unsaved = flags.unsaved(self.args())
        for place in self.locate("lr"):
            group = dict(get(self.trees[place.file], place.path[:-1]))
            before = self.rate(group)
            plain = megatron.learning_rate(schedule, group, unsaved)
            for field, (old, value) in own.items():
                if group.get(field) == old:
                    group[field] = value
            after = megatron.learning_rate(new, group, unsaved)
            settings.append(Setting("lr", place, after * (before / plain if plain else 1.0)))
        now, warmup = (megatron.value(new, key) for key in ("num_steps", "warmup"))
        if now < warmup:
            warnings.append(f"still warming up: sample {now} of {warmup}")
        return settings, warnings

    # --- meaning ---------------------------------------------------------------------------------

    def contradictions(self) -> list[str]:
        """See `megatron_flags`."""
        return flags.contradictions(self)

    def optimizers(self) -> list[Optimizer]:
        """Where the optimizers are kept."""
        return self._optimizers

    def roots(self) -> list[tuple[Path, tuple[Key, ...]]]:
        """Where args, counters and the scheduler are kept."""
        return self._roots

    def state(self) -> State:
        """The promise of this checkpoint. Raises Disagreement with the files that differ."""
        if self._state is None:
            with understood(self.path):
                self._state = self._read_state()
        return self._state

    def _read_state(self) -> State:
        schedule, args = self.schedule(), self.args()
        groups = [group for item in self._optimizers for group in self.groups(item)]
        if not groups:
            raise SurgeryError(
                f"{self.path.name} keeps no optimizer (saved with --no-save-optim)",
                next="ckptsurgeon status    a step that has one",
            )
        for name in (*SCHEDULE, "lr", "weight_decay"):
            agree(name, [p for p in self.locate(name) if p.wins])
        rates = [self.rate(group) for group in groups]
        decays = [self._decay(group) for group in groups]
        betas, eps, adam, scale, samples = (
            self.agreed(name)
            for name in ("betas", "eps", "adam_step", "loss_scale", "consumed_samples")
        )
        iteration = self.agreed("iteration")
        step = int(iteration[0]) if iteration else self.step
        main = next((i for i, g in enumerate(groups) if g.get("default_config")), 0)
        # a list of sizes by samples is not understood here
        size = None if args.get("step_batch_size_schedule") else args.get("global_batch_size")
        notes = known_globals.notes(self.shallow_globals())
        notes += flags.notes(self, main)
        promise = Promise(
            step=step + 1,
            lr=rates[main],
            betas=(float(betas[0][0]), float(betas[0][1])) if betas else None,
            eps=float(eps[0]) if eps else None,
            weight_decay=tuple(decays) or None,
            adam_step=int(max(adam)) if adam else None,
            loss_scale=float(scale[0]) if scale else 1.0,
            clip_grad=None,
            consumed_samples=int(samples[0]) if samples else None,
            skip=None,
            seed=None,
        )
        return State(
            step=step,
            promise=promise,
            schedule=None if schedule is None else flags.plain(schedule, groups[main]),
            dialect=self.dialect(),
            data_parallel=int(args.get("data_parallel_size") or 1),
            model_parallel=len(self._roots),
            dynamic_loss_scale=bool(scale),
            tokens=None,
            gigaflos=None,
            saved_at=max(file.stat().st_mtime for file, _ in self._roots),
            notes=tuple(notes),
            batch_size=size if isinstance(size, int) else None,
            rampup=flags.rampup(args),
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

    def agreed(self, name: str) -> list[Any]:
        """The winning values of `name` in the first file, equal in all files."""
        places = [place for place in self.locate(name) if place.wins]
        if name == "adam_step":
            places = [Place(p.file, (), p.value) for p in places if not isinstance(p.value, Tensor)]
        agree(name, places)
        return [place.value for place in places if place.file == places[0].file]
