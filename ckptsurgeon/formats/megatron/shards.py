"""Where the shards of one Megatron-LM step keep each field, and which place wins on load.

Legacy and torch_dist checkpoints hold the same state: a **root** is a place that has it, once a
model-parallel rank in the one, once in all in the other (dist.py). Source of what wins on load:
`megatron/training/checkpointing.py`, `megatron/core/optimizer{,_param_scheduler}.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

from ckptsurgeon.errors import NotUnderstood, SurgeryError
from ckptsurgeon.files.pickles.tree import Object, get, tensors
from ckptsurgeon.formats.capabilities import HasPadding
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.understood import not_understood, understood
from ckptsurgeon.formats.fields.values import Place, StateDict, Strip
from ckptsurgeon.formats.megatron import arguments
from ckptsurgeon.formats.megatron.options import BATCH
from ckptsurgeon.formats.optimizers import table
from ckptsurgeon.formats.optimizers.state_dict import state_dict
from ckptsurgeon.formats.places import moments
from ckptsurgeon.formats.places.moments import ALL
from ckptsurgeon.formats.schedules import megatron
from ckptsurgeon.formats.schedules.names import NAMES, is_megatron
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

ARGS = {
    "consumed_samples": "consumed_train_samples",
    "clip_grad": "clip_grad",
    "seed": "seed",
}
"""Field → its name in the saved args; only the first is read back."""
IN_GROUPS = ("lr", "betas", "eps", "initial_lr")
"""Fields of the param groups that nothing rewrites."""


class Optimizer(NamedTuple):
    """One optimizer of a chain: `base` leads to its param groups and their state, `scaler` to what
    its gradient scaler saved."""

    file: Path
    base: tuple[Key, ...]
    scaler: tuple[Key, ...]


@dataclass
class MegatronShards(Checkpoint, HasPadding):
    """One `iter_<N>` with its trees: roots and optimizers, and the fields in them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.odd: list[NotUnderstood] = []
        """What is in the place of an optimizer, and is none."""
        with understood(self.path):
            self._roots = list(self.find_roots())
            if not self._roots:
                raise SurgeryError(
                    f"{self.path.name} holds no state of Megatron-LM",
                    next=command("status", why="list the complete steps"),
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
            state = get(self.trees[file], path)
        except KeyError:
            return
        inner = state.get("optimizer", {}) if isinstance(state, Mapping) else {}
        if state is not None and not isinstance(state, (Mapping, list, tuple)):
            self.odd.append(not_understood(file, path, state, "an optimizer"))
        if not isinstance(inner, Mapping):
            keys = (*path, "optimizer")
            self.odd.append(not_understood(file, keys, inner, "the state of an optimizer"))
        if isinstance(state, Mapping) and "param_groups" in state:
            yield Optimizer(file, path, (*path, "grad_scaler"))
        elif isinstance(state, Mapping) and "optimizer" in state:
            yield Optimizer(file, (*path, "optimizer"), (*path, "grad_scaler"))
        elif isinstance(state, (list, tuple)):
            for i in range(len(state)):
                yield from self.chain(file, (*path, i))
        elif isinstance(state, Mapping):  # torch_dist numbers them
            for key in state:
                if isinstance(key, int):
                    yield from self.chain(file, (*path, key))

    def groups(self, item: Optimizer) -> list[Mapping[str, Any]]:
        """Its param groups; none when they are kept elsewhere. Raises NotUnderstood for another
        thing in their place."""
        path = (*item.base, "param_groups")
        try:
            entries = get(self.trees[item.file], path)
        except KeyError:
            return []
        if not isinstance(entries, (list, tuple)):
            raise not_understood(item.file, path, entries, "a list of param groups")
        for i, group in enumerate(entries):
            if not isinstance(group, Mapping):
                raise not_understood(item.file, (*path, i), group, "a param group")
        return [*entries]

    def all_groups(self) -> list[Mapping[str, Any]]:
        """The param groups of every optimizer, in order."""
        return [group for item in self._optimizers for group in self.groups(item)]

    def main(self) -> int:
        """The number of the group whose rate is the command line's: what the trainer logs."""
        marked = (i for i, group in enumerate(self.all_groups()) if group.get("default_config"))
        return next(marked, 0)

    def in_roots(self, *path: Key, wins: bool = True) -> list[Place]:
        """`path` in every root."""
        return [p for file, prefix in self._roots for p in self.at(file, (*prefix, *path), wins)]

    def group_around(self, place: Place) -> Mapping[str, Any]:
        """The param group that a place of `in_groups` is in."""
        group: Mapping[str, Any] = get(self.trees[place.file], place.path[:-1])
        return group

    def in_groups(self, name: str, wins: bool, none: bool = False) -> list[Place]:
        """`name` in every param group that has a value for it, or also those where it is None."""
        return [
            place
            for item in self._optimizers
            for i in range(len(self.groups(item)))
            for place in self.at(item.file, (*item.base, "param_groups", i, name), wins)
            if none or place.value is not None
        ]

    def schedule(self) -> Mapping[str, Any] | None:
        """The state of the OptimizerParamScheduler in the first root."""
        file, prefix = self._roots[0]
        for name in ("lr_scheduler", "opt_param_scheduler"):
            try:
                state = get(self.trees[file], (*prefix, name))
            except KeyError:
                continue
            if is_megatron(state):
                return state  # type: ignore[no-any-return]
        return None

    def schedule_places(self, field: str, wins: bool = True) -> list[Place]:
        """A key of the scheduler's state in every root; `field` as in `names.NAMES`."""
        names = NAMES.get(field, (field,))
        return [
            place
            for outer in ("lr_scheduler", "opt_param_scheduler")
            for name in names
            for place in self.in_roots(outer, name, wins=wins)
        ]

    def roots(self) -> list[tuple[Path, tuple[Key, ...]]]:
        """File and path of the state of each model-parallel rank."""
        return self._roots

    def optimizers(self) -> list[Optimizer]:
        """Where the optimizers are kept."""
        return self._optimizers

    def args(self) -> Mapping[str, Any]:
        """The saved command line of the first root."""
        file, prefix = self._roots[0]
        places = self.at(file, (*prefix, "args"))
        values = getattr(places[0].value, "state", None) if places else None
        return values if isinstance(values, dict) else {}

    @property
    def found_by_settings(self) -> bool:
        """Whether the loader finds a param group again by what `identity.KEYS` says of it."""
        return True

    def pending(self) -> int | None:
        """The iteration that is to be run again, as its result was doubted; None without one."""
        for place in self.in_roots("rerun_state_machine", "state"):
            state = place.value.args[0] if isinstance(place.value, Object) else place.value
            if state not in (0, None, "NOT_RUNNING_YET"):
                held = self.in_roots("rerun_state_machine", "current_iteration")
                number = held[0].value if held else None
                return number if isinstance(number, int) else self.step
        return None

    def rate(self, group: Mapping[str, Any]) -> float:
        """The lr that the scheduler gives to a param group at the saved position.

        Some versions multiply it by the group's `lr_mult`: the saved lr shows which."""
        schedule = self.schedule()
        if schedule is None:
            return float(group["lr"])
        lr = megatron.learning_rate(schedule, group, arguments.unsaved(self.args()))
        mult, saved = group.get("lr_mult", 1.0), group.get("lr")
        if isinstance(saved, (int, float)) and isinstance(mult, (int, float)):
            scaled = isclose(saved, lr * mult, rel_tol=1e-9)
            return lr * mult if scaled and not isclose(saved, lr, rel_tol=1e-9) else lr
        return lr

    # --- places ----------------------------------------------------------------------------------

    def find(self, field: str) -> list[Place]:
        """In the groups, the scheduler's state, the args and the optimizers, as a load does."""
        if field in ("max_lr", "min_lr"):
            own = self.in_groups(field, wins=True, none=True)  # None is no rate of the scheduler's
            return own + self.schedule_places(field, wins=not own)
        if field in NAMES:
            return self.schedule_places(field)
        if field == "weight_decay":
            in_groups = [self.in_groups(key, wins=True) for key in ("start_wd", "end_wd")]
            in_schedule = [p for key in ("start_wd", "end_wd") for p in self.schedule_places(key)]
            copies = self.in_groups(field, wins=not in_schedule and not any(in_groups))
            return [*in_schedule, *in_groups[0], *in_groups[1], *copies]
        if field in IN_GROUPS:
            return self.in_groups(field, wins=field != "lr" or self.schedule() is None)
        if field == "adam_step":
            return self._steps()
        if field in ALL:
            return self.moments(field)
        if field in ARGS:
            return self.in_roots("args", ARGS[field], wins=field == "consumed_samples")
        if field in BATCH:
            return self.in_roots("args", BATCH[field], wins=False)
        if field == "iteration":
            return self.in_roots(field) + self.in_roots("args", field, wins=False)
        if field == "loss_scale":
            scales = (self.at(item.file, (*item.scaler, "scale")) for item in self._optimizers)
            return [place for places in scales for place in places]
        return []

    def deciding(self, field: str) -> Sequence[Place]:
        """No copy in the args is read back, so whatever it holds decides nothing."""
        return [] if field in ("clip_grad", "seed") else super().deciding(field)

    def _steps(self) -> list[Place]:
        return self.in_groups("step", wins=True) + self.steps_in_state()

    def steps_in_state(self) -> list[Place]:
        """What the optimizers count for each parameter, or once for all."""
        out: list[Place] = []
        for item in self._optimizers:
            try:
                state = get(self.trees[item.file], (*item.base, "state"))
            except KeyError:
                continue
            out += self.at(item.file, (*item.base, "state", "common_step"))
            for key, entry in state.items():
                if isinstance(entry, Mapping) and "step" in entry:
                    out += self.at(item.file, (*item.base, "state", key, "step"))
        return out

    def state_dicts(self) -> list[StateDict]:
        """Of each optimizer, and of the flat buckets that a distributed one keeps elsewhere."""
        with understood(self.path):
            out = [
                state_dict(item.file, item.base, get(self.trees[item.file], item.base))
                for item in self._optimizers
            ]
            buckets = [table.with_groups(each, out) for each in self.buckets() if out]
        return [*(each for each in out if each.state or not buckets), *buckets]

    def buckets(self) -> list[StateDict]:
        """The tensors of each `distrib_optim.pt`, by the last key of their path."""
        out = []
        for file, tree in self.trees.items():
            if file.name != "distrib_optim.pt":
                continue
            state: dict[str, list[Place]] = {}
            for path, tensor in tensors(tree):
                plain = tuple(k if isinstance(k, (str, int)) else repr(k) for k in path)
                state.setdefault(str(path[-1]), []).append(Place(file, plain, tensor))
            out.append(StateDict(file, state, {}))
        return out

    def unpadded(self, strip: Strip) -> Strip | None:
        """Of a flat bucket without the padding at its end."""
        place = next((place for place, _ in strip.tensors.values()), None)
        if place is None:
            return strip
        try:
            beside = get(self.trees[place.file], place.path[:-1])
        except KeyError:
            return strip
        numel = beside.get("numel_unpadded") if isinstance(beside, Mapping) else None
        if not isinstance(numel, int) or not 0 < numel < strip.numel:
            return strip
        return strip._replace(numel=numel, shape=None)

    def moments(self, name: str) -> list[Place]:
        """Every tensor of one moment, in any shard; in `distrib_optim.pt` a key is a pair of
        dtypes, which a path names by its text."""
        places = [
            Place(file, tuple(k if isinstance(k, (str, int)) else repr(k) for k in path), tensor)
            for file, tree in self.trees.items()
            for path, tensor in tensors(tree)
            if path and path[-1] == name
        ]
        for item in self._optimizers:
            path = (*item.base, "state")
            states = self.value(item.file, path)
            for key, entry in states.items() if isinstance(states, Mapping) else ():
                if isinstance(entry, Mapping) and name not in entry:  # quantized
                    places += moments.places(self, item.file, (*path, key), entry, name)
        return places
