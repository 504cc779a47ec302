"""One saved step with optimizers of torch in it: where each field is kept, and what it means.

Checked against torch's own reader and optimizer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptsurgeon.errors import NotUnderstood, SurgeryError, count
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.capabilities import Cools, NamesGroups
from ckptsurgeon.formats.checkpoint import agree
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.optimizer import Optimizer
from ckptsurgeon.formats.dcp.shards import DcpShards, placed
from ckptsurgeon.formats.fields import known_globals
from ckptsurgeon.formats.fields.constants import GROUP
from ckptsurgeon.formats.fields.understood import said_in
from ckptsurgeon.formats.fields.values import (
    COUNTING,
    MOMENTS,
    Part,
    Place,
    State,
    StateDict,
    Weight,
)
from ckptsurgeon.formats.optimizers.table import COUNTED
from ckptsurgeon.formats.places.moments import ALL
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

FOREIGN = re.compile(r"(^|\.)(state|param_groups)\.")
"""What the name of a value of an optimizer has in it, whoever saved it."""


@dataclass
class DcpCheckpoint(DcpShards, Cools, NamesGroups, ABC):
    """One step's folder. `options` are those of the trainer's config, by key of a recipe. `prefix`
    is how the names of the optimizer begin in `saved`; `further` are other ones, each with the
    folder that it is in, `models` the folders of the weights where they are others."""

    trainer: str = field(kw_only=True)
    prefix: str = field(kw_only=True)
    further: tuple[tuple[Saved, str], ...] = field(kw_only=True, default=())
    models: tuple[Saved, ...] = field(kw_only=True, default=())
    options: Mapping[str, str] = field(kw_only=True)

    named_by_folder: ClassVar[bool] = False
    """Whether only the name of the step's folder says whose it is, and no page or other file."""
    counters: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Counter → the path of its value; each trainer keeps them where it likes (`counted`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = ((self.saved, self.prefix), *self.further)
        self.optimizers = [Optimizer(saved, prefix) for saved, prefix in named]
        every = (*(saved for saved, _ in named), *self.models)
        self.folders = {saved.path: saved for saved in every}

    @property
    def foreign(self) -> str:
        """A name of an optimizer that is not this trainer's, in a folder that is only named so; no
        text where there is none."""
        if not self.named_by_folder:
            return ""
        if any(True for each in self.optimizers if each.groups or any(each.steps())):
            return ""
        return next((name for name in self.saved.items if FOREIGN.search(name)), "")

    def refuse_foreign(self) -> None:
        """Raise NotUnderstood for a folder with an optimizer by names that are not this trainer's:
        only the name of the step is."""
        if name := self.foreign:
            raise NotUnderstood(
                f"{self.path.name} is named like a step of {self.trainer} but is not one: it holds "
                f"{name}, and nothing named {self.prefix}*; a page with `loader: dcp` can say "
                "what is whose (docs/described.md)",
                next=command("check-format", "FILE", why="tries your page; then --format FILE"),
            )

    # --- places ----------------------------------------------------------------------------------

    def find(self, field: str) -> list[Place]:
        """Among the values of the optimizer, and the counters beside it."""
        if field in (*GROUP, *ALL, *self.counters, "adam_step"):
            self.refuse_foreign()
        if field in GROUP:
            wins = self.wins(field)
            return [
                place
                for each in self.optimizers
                for name in each.groups.get(field, ())
                for place in self.scalar(name, wins, each.saved)
            ]
        if field == "adam_step":
            named = ((name, each.saved) for each in self.optimizers for name in each.steps())
            return [place for name, saved in named for place in self.scalar(name, True, saved)]
        if field in ALL:
            names = [field, "momentum"] if field == "momentum_buffer" else [field]  # Dion's Muon
            places = [place for each in names for place in self.moments(each)]
            return [place for place in places if self._of(place) is not None]
        return self.counted(field) if field in self.counters else []

    @abstractmethod
    def counted(self, field: str) -> list[Place]:
        """The places of one of `counters`."""

    def wins(self, field: str) -> bool:
        """Whether the next step uses what the param groups hold of `field`."""
        return True

    def _of(self, place: Place) -> Optimizer | None:
        """The optimizer that has the place."""
        name = str(place.path[0])
        of_file = (each for each in self.optimizers if each.saved.path == place.file)
        return next((each for each in of_file if each.has(name)), None)

    def parameters_at(self, place: Place) -> tuple[str, ...]:
        """Those of the group that has the setting at `place`."""
        optimizer = self._of(place)
        if optimizer is None:
            return ()
        return optimizer.parameters(str(place.path[0]), self.trees[place.file])

    def group_of(self, place: Place) -> int:
        """By the number in the name; the first of one that is saved by its parameters."""
        optimizer = self._of(place)
        owner = optimizer.owner(str(place.path[0])) if optimizer is not None else ""
        return int(owner) if owner.isdigit() else 0

    def beside(self, place: Place, key: str) -> tuple[Key, ...]:
        """Another value, or the number in a tensor."""
        name = f"{str(place.path[0]).rpartition('.')[0]}.{key}"
        items = self.folders[place.file].items
        return (name, 0) if name in items and items[name].is_number else (name,)

    def settings(self, key: str) -> list[Place]:
        """Of every parameter."""
        return [
            place
            for each in self.optimizers
            for name in each.groups.get(key, ())
            for place in self.scalar(name, True, each.saved)
        ]

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """Each parameter has settings of its own; an lr is refused, as the schedule is in the
        config."""
        if key == "lr":
            raise SurgeryError(
                f"{self.trainer} computes the rates of its groups from its config",
                next=f"relaunch the trainer with another {self.options['lr']} for the group",
            )
        return [(self.parameters_at(place), place) for place in self.settings(key)]

    def in_config(self, keys: Iterable[str], flags: str) -> SurgeryError:
        """The refusal of parts of the schedule, with the options that decide them."""
        return SurgeryError(
            f"{self.trainer} computes the schedule from its own config at every step, so "
            f"{', '.join(sorted(keys))} has no place in a checkpoint",
            next=f"relaunch the trainer with {flags}",
        )

    def parts(self) -> list[Part]:
        """Each chunk of a tensor is a cut; the weights are their own masters."""
        self.refuse_foreign()
        out: list[Part] = []
        for each in self.optimizers:
            for name in each.saved.items:
                owner, _, kind = name.removeprefix(each.inside).rpartition(".")
                if name.startswith(each.inside) and kind in MOMENTS:
                    out += self.chunks(each.saved, name, self.full(each.saved.path, owner), kind)
        for saved, name, owner in self.named_weights():
            chunks = self.chunks(saved, name, owner, "weights")
            out += (part for part in chunks if part.place.value.dtype not in COUNTING)
        return out

    def weights(self) -> Iterator[Weight]:
        """As `DcpShards` does, of this trainer's folders."""
        self.refuse_foreign()
        return super().weights()

    def named_weights(self) -> Iterator[tuple[Saved, str, str]]:
        """Each weight: where it is saved, by which name, and the parameter that it is of."""
        for saved in self.folders.values():
            states = tuple(each.inside for each in self.optimizers if each.saved is saved)
            for name in saved.items:
                if not name.startswith(states) and not weights.STATE.match(name):
                    yield saved, name, self.full(saved.path, name.removeprefix("model."))

    def state_dicts(self) -> list[StateDict]:
        """One for all parameters of an optimizer with the same keys, as several may be one flat
        dict. Of a setting, the first parameter's: only what an optimizer counts may differ."""
        self.refuse_foreign()
        return [
            self._state_dict(each, alike, states)
            for each in self.optimizers
            for states in (each.states(),)
            for alike in each.alike(states, self.trees[each.saved.path])
        ]

    def headers(self) -> list[StateDict]:
        """By the names of the values: none of a state is read."""
        out = []
        for each in self.optimizers:
            states = each.states()
            bare = {owner: dict.fromkeys(keys, ()) for owner, keys in states.items()}
            alike = each.alike(states, self.trees[each.saved.path])
            out += [self._state_dict(each, owners, bare) for owners in alike]
        return out

    def _state_dict(
        self,
        optimizer: Optimizer,
        owners: list[str],
        states: Mapping[str, Mapping[str, Sequence[tuple[Key, ...]]]],
    ) -> StateDict:
        saved = optimizer.saved
        values = self.trees[saved.path]
        state: dict[str, list[Place]] = {}
        for owner in owners:
            for key, paths in states.get(owner, {}).items():
                places = [placed(saved.path, path, get(values, path)) for path in paths]
                state.setdefault(key, []).extend(places)
        group: dict[str, list[Place]] = {}
        own = set(owners)
        for key, names in optimizer.groups.items():
            if key == "params":
                continue
            mine = [name for name in names if own & {*optimizer.parameters(name, values)}]
            read = mine if key in COUNTED else mine[:1]
            places = [place for name in read for place in self.scalar(name, True, saved)]
            if places:
                group[key] = places
        return StateDict(saved.path, state, group)

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Both train without a loss scale."""
        return []

    # --- meaning ---------------------------------------------------------------------------------

    def contradictions(self) -> list[str]:
        """Counters that differ between ranks, or from the folder's name; impossible numbers."""
        out: list[str] = []
        for name in (*GROUP, "adam_step", *self.counters):
            with said_in(out):
                places = self.locate(name)
                if name in self.counters:
                    agree(name, places)
                if name == "iteration" and places:
                    out += self._of_another_step(places[0].value)
        return list(dict.fromkeys(out))

    def _of_another_step(self, iteration: int) -> list[str]:
        """`set iteration` leaves Adam's step; a checkpoint of another step has its own."""
        taken = {place.value for place in self.locate("adam_step")}
        foreign = iteration != self.step and (not taken or iteration in taken)
        return [f"{self.path.name}: holds step {iteration}"] if foreign else []

    def alike(self, field: str) -> list[Sequence[Place]]:
        """Of the param groups every place, also one that no load takes."""
        if self.varies(field):
            return [[place] for place in self.locate(field)]
        return super().alike(field)

    def varies(self, field: str) -> bool:
        """A param group may be of one parameter."""
        return field not in self.counters

    @property
    def has_optimizer(self) -> bool:
        """By its param groups."""
        return any(each.groups for each in self.optimizers)

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
        self.refuse_foreign()
        if not self.has_optimizer:
            raise SurgeryError(
                f"{self.path.name} keeps no optimizer: it holds the model alone",
                next=command("status", why="a step that has one"),
            )
        iteration, tokens = self.clear("iteration"), self.clear("tokens")
        step = int(iteration[0]) if iteration else self.step
        files = (path.stat().st_mtime for path in (*self.folders, *self.archives))
        none: float | None = None
        rate = self.where_clear("lr", self.next_rate, none)
        return State(
            step=step,
            promise=self.promise(step, rate),
            schedule=None,
            dialect=f"{self.trainer} · torch dcp · {count(len(self.saved.items), 'value')}",
            data_parallel=max(1, len(self.archives)),
            model_parallel=1,
            dynamic_loss_scale=False,
            tokens=int(tokens[0]) if tokens else None,
            gigaflos=None,
            saved_at=max(files),
            notes=tuple(self.where_clear("scheduler", self.notes, [])),
            peak_lr=self.where_clear("lr", self.peak, none),
            scheduler=self.where_clear("scheduler", self.scheduler, "an unknown schedule"),
        )

    def notes(self) -> list[str]:
        """What a reader of the promise must know."""
        notes = known_globals.notes(
            {saved.path.name: saved.globals for saved in self.folders.values()}
        )
        if len(self.optimizers) > 1:
            notes.append(
                f"{count(len(self.optimizers), 'optimizer')}: the lr is that of the first one"
            )
        return notes


def scaled(value: Any, factor: float) -> Any:
    """A number times `factor`; anything else as it is."""
    return value * factor if isinstance(value, (int, float)) else value
