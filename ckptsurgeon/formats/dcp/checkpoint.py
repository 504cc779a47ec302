"""One saved step with an optimizer of torch in it: where each field is kept, and what it means.

The optimizer is a flat dict, as torch flattens it: `<prefix>state.<parameter>.exp_avg`,
`<prefix>param_groups.<parameter or number>.lr`. Checked against torch's own reader and optimizer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptsurgeon.edits import Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats import known_globals
from ckptsurgeon.formats.checkpoint import agree
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.shards import DcpShards
from ckptsurgeon.formats.moments import ALL
from ckptsurgeon.formats.optimizers.table import COUNTED
from ckptsurgeon.formats.values import COUNTING, MOMENTS, Part, Place, State, StateDict

GROUP = ("lr", "initial_lr", "betas", "eps", "weight_decay")


@dataclass
class DcpCheckpoint(DcpShards, ABC):
    """One step's folder. `options` are those of the trainer's config, by key of a recipe."""

    trainer: str = field(kw_only=True)
    prefix: str = field(kw_only=True)
    options: Mapping[str, str] = field(kw_only=True)

    counters: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Counter → the path of its value; each trainer keeps them where it likes (`counted`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = re.compile(re.escape(self.prefix) + r"param_groups\.(.+)\.(\w+)")
        self._groups: dict[str, list[str]] = {}
        for name in self.saved.items:
            if match := pattern.fullmatch(name):
                self._groups.setdefault(match[2], []).append(name)

    # --- places ----------------------------------------------------------------------------------

    def find(self, field: str) -> list[Place]:
        """Among the values of the optimizer, and the counters beside it."""
        if field in GROUP:
            wins = self.wins(field)
            return [p for fqn in self._groups.get(field, ()) for p in self.scalar(fqn, wins)]
        if field == "adam_step":
            steps = re.compile(re.escape(self.prefix) + r"state\..+\.step")
            return [p for fqn in self.saved.items if steps.fullmatch(fqn) for p in self.scalar(fqn)]
        if field in ALL:
            inside = f"{self.prefix}state."
            names = [field, "momentum"] if field == "momentum_buffer" else [field]  # Dion's Muon
            places = [place for each in names for place in self.moments(each)]
            return [place for place in places if str(place.path[0]).startswith(inside)]
        return self.counted(field) if field in self.counters else []

    @abstractmethod
    def counted(self, field: str) -> list[Place]:
        """The places of one of `counters`."""

    def wins(self, field: str) -> bool:
        """Whether the next step uses what the param groups hold of `field`."""
        return True

    def _owner(self, name: str, key: str) -> str:
        """What owns the setting `name`: a parameter, or the number of a group."""
        return name.removeprefix(f"{self.prefix}param_groups.").removesuffix(f".{key}")

    def _parameters(self, owner: str) -> tuple[str, ...]:
        """The parameters of a group that is saved by its number; else the one that `owner` is."""
        name = f"{self.prefix}param_groups.{owner}.params"
        if name not in self.saved.items:
            return (owner,)
        return tuple(str(parameter) for parameter in self.trees[self.saved.path][name])

    def group_of(self, place: Place) -> int:
        """By the number in the name; the first of one that is saved by its parameters."""
        owner = str(place.path[0]).removeprefix(f"{self.prefix}param_groups.").partition(".")[0]
        return int(owner) if owner.isdigit() else 0

    def beside(self, place: Place, key: str) -> tuple[Key, ...]:
        """Another value."""
        return (f"{str(place.path[0]).rpartition('.')[0]}.{key}",)

    def settings(self, key: str) -> list[Place]:
        """Of every parameter."""
        return [place for name in self._groups.get(key, ()) for place in self.scalar(name)]

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """Each parameter has settings of its own; an lr is refused, as the schedule is in the
        config."""
        if key == "lr":
            raise SurgeryError(
                f"{self.trainer} computes the rates of its groups from its config",
                next=f"relaunch the trainer with another {self.options['lr']} for the group",
            )
        return [
            (self._parameters(self._owner(name, key)), place)
            for name in self._groups.get(key, ())
            for place in self.scalar(name)
        ]

    def parts(self) -> list[Part]:
        """Each chunk of a tensor is a cut; the weights are their own masters."""
        inside = f"{self.prefix}state."
        out: list[Part] = []
        for name in self.saved.items:
            owner, _, kind = name.removeprefix(inside).rpartition(".")
            if name.startswith(inside) and kind in MOMENTS:
                out += self._chunks(self.saved, name, owner, kind)
        for saved, name, owner in self.named_weights():
            chunks = self._chunks(saved, name, owner, "weights")
            out += (part for part in chunks if part.place.value.dtype not in COUNTING)
        return out

    def named_weights(self) -> Iterator[tuple[Saved, str, str]]:
        """Each weight: where it is saved, by which name, and the parameter that it is of."""
        for name in self.saved.items:
            if not name.startswith(f"{self.prefix}state.") and not weights.STATE.match(name):
                yield self.saved, name, name.removeprefix("model.")

    def _chunks(self, saved: Saved, name: str, owner: str, kind: str) -> Iterator[Part]:
        """None of a value that is no tensor."""
        for chunk, item in enumerate(saved.items[name]):
            if item.offset is not None:
                place = Place(saved.path, (name, chunk), self.trees[saved.path][name][chunk])
                cut = ".".join(map(str, item.offset))
                yield Part(owner, cut, kind, place, 0, place.value.numel, 0)

    def state_dicts(self) -> list[StateDict]:
        """One for all parameters with the same keys, as several optimizers are one flat dict. Of a
        setting, the first parameter's: only what an optimizer counts may differ."""
        states = self._states()
        return [self._state_dict(alike, states) for alike in self._alike(states)]

    def headers(self) -> list[StateDict]:
        """By the names of the values: none of a state is read."""
        states = self._states()
        bare = {owner: dict.fromkeys(keys, ()) for owner, keys in states.items()}
        return [self._state_dict(alike, bare) for alike in self._alike(states)]

    def _states(self) -> dict[str, dict[str, list[tuple[Key, ...]]]]:
        """Parameter → key → the path of each value."""
        states: dict[str, dict[str, list[tuple[Key, ...]]]] = {}
        inside = f"{self.prefix}state."
        for name, items in self.saved.items.items():
            if name.startswith(inside):
                tensor = items[0].offset is not None
                paths: list[tuple[Key, ...]] = [(name, i) for i in range(len(items))]
                owner, _, key = name.removeprefix(inside).rpartition(".")
                states.setdefault(owner, {})[key] = paths if tensor else [(name,)]
        return states

    def _alike(self, states: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
        """The parameters, and the groups without a state, by what is kept of them."""
        keys: dict[str, list[str]] = {owner: list(own_keys) for owner, own_keys in states.items()}
        for key, names in self._groups.items():
            for name in names:
                for owner in self._parameters(self._owner(name, key)):
                    keys.setdefault(owner, []).append(f"group {key}")
        out: dict[frozenset[str], list[str]] = {}
        for owner, own_keys in keys.items():
            out.setdefault(frozenset(own_keys), []).append(owner)
        return list(out.values())

    def _state_dict(
        self, owners: list[str], states: Mapping[str, Mapping[str, Sequence[tuple[Key, ...]]]]
    ) -> StateDict:
        values = self.trees[self.saved.path]
        state: dict[str, list[Place]] = {}
        for owner in owners:
            for key, paths in states.get(owner, {}).items():
                places = [Place(self.saved.path, path, get(values, path)) for path in paths]
                state.setdefault(key, []).extend(places)
        group: dict[str, list[Place]] = {}
        own = set(owners)
        for key, names in self._groups.items():
            if key == "params":
                continue
            mine = [n for n in names if not own.isdisjoint(self._parameters(self._owner(n, key)))]
            read = mine if key in COUNTED else mine[:1]
            places = [place for name in read for place in self.scalar(name)]
            if places:
                group[key] = places
        return StateDict(self.saved.path, state, group)

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Both train without a loss scale."""
        return []

    # --- meaning ---------------------------------------------------------------------------------

    def contradictions(self) -> list[str]:
        """Counters that differ between ranks, or from the folder's name; impossible numbers."""
        out: list[str] = []
        for name in (*GROUP, "adam_step", *self.counters):
            try:
                places = self.locate(name)
                if name in self.counters:
                    agree(name, places)
                if name == "iteration" and places:
                    out += self._of_another_step(places[0].value)
            except SurgeryError as error:
                out.append(error.what)
        return list(dict.fromkeys(out))

    def _of_another_step(self, iteration: int) -> list[str]:
        """`set iteration` leaves Adam's step; a checkpoint of another step has its own."""
        taken = {place.value for place in self.locate("adam_step")}
        foreign = iteration != self.step and (not taken or iteration in taken)
        return [f"{self.path.name}: holds step {iteration}"] if foreign else []

    def agreed(self, field: str) -> list[Any]:
        """Of the param groups, one for each parameter, every different value once."""
        if field in self.counters:
            return super().agreed(field)
        return list(dict.fromkeys(_key(place.value) for place in self.locate(field)))

    @abstractmethod
    def next_rate(self) -> float | None:
        """The lr of the next update; None where it is not known."""

    @abstractmethod
    def peak(self) -> float | None:
        """What `lr` of a recipe sets and scales; None where it sets none."""

    @abstractmethod
    def scheduler(self) -> str:
        """The schedule in words."""

    def read_state(self) -> State:
        """The lr is that of the first parameter."""
        if not self.locate("lr"):
            raise SurgeryError(
                f"{self.path.name} keeps no optimizer: it holds the model alone",
                next="ckptsurgeon status    a step that has one",
            )
        iteration, tokens = self.agreed("iteration"), self.agreed("tokens")
        step = int(iteration[0]) if iteration else self.step
        files = (path.stat().st_mtime for path in (self.saved.path, *self.archives))
        return State(
            step=step,
            promise=self.promise(step, self.next_rate()),
            schedule=None,
            dialect=f"{self.trainer} · torch dcp · {len(self.saved.items)} values",
            data_parallel=max(1, len(self.archives)),
            model_parallel=1,
            dynamic_loss_scale=False,
            tokens=int(tokens[0]) if tokens else None,
            gigaflos=None,
            saved_at=max(files),
            notes=tuple(self.notes()),
            peak_lr=self.peak(),
            scheduler=self.scheduler(),
        )

    def notes(self) -> list[str]:
        """What a reader of the promise must know."""
        return known_globals.notes({self.saved.path.name: self.saved.globals})


def scaled(value: Any, factor: float) -> Any:
    """A number times `factor`; anything else as it is."""
    return value * factor if isinstance(value, (int, float)) else value


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
