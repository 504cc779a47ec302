"""One saved step of a Megatron-LM run in the torch_dcp or the fsdp_dtensor format.

Both are the trainer's nested state as torch.distributed.checkpoint flattens it: a value for each
leaf, named by its path (`opt_param_scheduler.max_lr`). torch_dcp (torch's FSDP2) numbers param
groups and parameters; fsdp_dtensor (Megatron-FSDP) names them, and keeps a group's settings once
for each of its parameters (`param_to_group_meta`). Source: `save_checkpoint` in
`megatron/training/checkpointing.py`, `sharded_param_state_fsdp_dtensor` in
`megatron/core/optimizer/distrib_optimizer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon.errors import count
from ckptsurgeon.files.dcp import Saved, Values
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.capabilities import NamesMoments
from ckptsurgeon.formats.dcp.shards import DcpShards, placed
from ckptsurgeon.formats.fields.understood import understood
from ckptsurgeon.formats.fields.values import NUMBER, Part, Place, State, StateDict
from ckptsurgeon.formats.megatron import flat_parts
from ckptsurgeon.formats.megatron.checkpoint import MegatronCheckpoint
from ckptsurgeon.formats.megatron.shards import Optimizer
from ckptsurgeon.formats.megatron.tiers import OTHER
from ckptsurgeon.formats.optimizers.table import COUNTED
from ckptsurgeon.plans.edits import Key

INSIDE = r"(?P<base>optimizer(?:\.\d+)?(?:\.optimizer)?)"
NUMBERED = re.compile(INSIDE + r"\.param_groups\.(?P<owner>\d+)\.(?P<key>\w+)")
NAMED = re.compile(INSIDE + r"\.param_to_group_meta\.(?P<owner>.+)\.(?P<key>\w+)")
STATE = re.compile(INSIDE + r"\.state\.(?P<owner>.+)\.(?P<key>\w+)")
NOT_LOADED = (
    "Adam's step is not loaded with torch_dcp, which asks for what a new optimizer has: it counts "
    "from 0 under the saved moments, and the first updates are too large (reset moments: both new)"
)
NOT_READ = (
    "the step is one that is not persistent, and of those the trainer reads torch_dist alone "
    "(0.19.2): a launch ends with an error until a rollback to a persistent step moves it aside"
)
ROOT = {"args", "iteration"}
"""Names that only these formats have: torch_dist keeps what they say inside another value."""
SCHEDULER = "opt_param_scheduler."


@dataclass
class MegatronFlatCheckpoint(DcpShards, MegatronCheckpoint):
    """One `iter_<N>` with `.metadata` and `.distcp` files alone. A place's path is the name of a
    value, wherever the trainer's state has it."""

    sharded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._groups: dict[str, dict[str, dict[str, str]]] = {}
        """Optimizer → number of a group, or parameter → key → name of the value."""
        self._named = False
        for name in self.saved.items:
            match = NUMBERED.fullmatch(name) or NAMED.fullmatch(name)
            if match:
                self._named = self._named or ".param_to_group_meta." in name
                owners = self._groups.setdefault(match["base"], {})
                owners.setdefault(match["owner"], {})[match["key"]] = name
        super().__post_init__()

    def loads_on(self) -> Mapping[str, int]:
        """On any: torch.distributed.checkpoint cuts anew."""
        return {}

    def at(self, file: Path, path: tuple[Key, ...], wins: bool = True) -> list[Place]:
        """Also by the path that the trainer's state has: the longest part of it that is a name."""
        if file != self.saved.path or (path[:1] and path[0] in self.saved.items):
            return super().at(file, path, wins)
        for length in range(len(path), 0, -1):
            name = ".".join(map(str, path[:length]))
            if items := self.saved.items.get(name):
                inner = (0,) if items.is_tensor else path[length:]
                return super().at(file, (name, *inner), wins)
        return []

    def find_roots(self) -> Iterator[tuple[Path, tuple[Key, ...]]]:
        """All values together."""
        if ROOT & self.saved.items.keys():
            yield self.saved.path, ()

    def find_optimizers(self) -> Iterator[Optimizer]:
        """By the names of their param groups."""
        for base in self._groups:
            keys = tuple(base.split("."))
            outer = keys[:-1] if keys[-1] == "optimizer" and len(keys) > 1 else keys
            yield Optimizer(self.saved.path, keys, (*outer, "grad_scaler"))

    def groups(self, item: Optimizer) -> list[Mapping[str, Any]]:
        """Its param groups; of those that are kept by parameter, each that differs once."""
        out: list[Mapping[str, Any]] = []
        for names in self._groups[".".join(map(str, item.base))].values():
            group = {key: self._value(name) for key, name in names.items() if key != "params"}
            if not self._named or group not in out:
                out.append(group)
        return out

    def group_around(self, place: Place) -> Mapping[str, Any]:
        """Of all values with the owner that the place's name has."""
        match = NUMBERED.fullmatch(str(place.path[0])) or NAMED.fullmatch(str(place.path[0]))
        assert match is not None
        names = self._groups[match["base"]][match["owner"]]
        return {key: self._value(name) for key, name in names.items() if key != "params"}

    def _value(self, name: str) -> Any:
        places = self.scalar(name)
        return places[0].value if places else None

    @property
    def asked(self) -> bool:
        """Not of a step that no launch reads."""
        return self.path.parent.name != OTHER

    def in_groups(self, name: str, wins: bool, none: bool = False) -> list[Place]:
        """In the settings of every group, or of every parameter. torch_dcp asks for those that a
        new optimizer has: no step."""
        wins = wins and (self._named or name != "step")
        return [p for p in self._settings(name, wins) if none or p.value is not None]

    def _settings(self, key: str, wins: bool = True) -> list[Place]:
        return [
            place
            for owners in self._groups.values()
            for names in owners.values()
            if key in names
            for place in self.scalar(names[key], wins)
        ]

    def settings(self, key: str) -> list[Place]:
        """Of every group, or of every parameter."""
        return self._settings(key)

    def schedule(self) -> Mapping[str, Any] | None:
        """The state of the OptimizerParamScheduler."""
        names = [name for name in self.saved.items if name.startswith(SCHEDULER)]
        state = {name.removeprefix(SCHEDULER): self._value(name) for name in names}
        return state or None

    @property
    def found_by_settings(self) -> bool:
        """Of torch_dcp; fsdp_dtensor has the settings of each parameter under its name."""
        return not self._named

    def varies(self, field: str) -> bool:
        """Of fsdp_dtensor, each of whose parameters has settings."""
        return self._named

    def steps_in_state(self) -> list[Place]:
        """Of each parameter, where the optimizer keeps it there; see `in_groups`."""
        names = (n for n in self.saved.items if (m := STATE.fullmatch(n)) and m["key"] == "step")
        return [place for name in names for place in self.scalar(name, self._named)]

    def read_state(self) -> State:
        """With what a load leaves out, or does not read."""
        state = super().read_state()
        forgets = not self._named and self.locate("adam_step")
        notes = [NOT_READ] * (self.path.parent.name == OTHER) + [NOT_LOADED] * bool(forgets)
        return replace(state, notes=(*state.notes, *notes))

    def state_dicts(self) -> list[StateDict]:
        """One for each optimizer. Of a setting, those of the first group or parameter; of what an
        optimizer counts, all."""
        out = []
        for base, owners in self._groups.items():
            state: dict[str, list[Place]] = {}
            for name in self.saved.items:
                match = STATE.fullmatch(name)
                if match and match["base"] == base:
                    values = self.trees[self.saved.path]
                    found = (
                        placed(self.saved.path, p, get(values, p)) for p in self.saved.paths(name)
                    )
                    state.setdefault(match["key"], []).extend(found)
            group: dict[str, list[Place]] = {}
            for names in owners.values():
                for key, name in names.items():
                    if not self._named or key in COUNTED or key not in group:
                        group.setdefault(key, []).extend(self.scalar(name))
            out.append(StateDict(self.saved.path, state, group))
        return out

    def fragments(self, name: str) -> list[Part]:
        """By parameter; of torch_dcp, which numbers them, where `parts` know their names."""
        if self._named:
            return super().fragments(name)
        owners = {p.place.path[0]: p.parameter for p in self.parts() if p.kind == name}
        out = [
            Part.whole(owners.get(place.path[0], NUMBER), "", name, place)
            for place in self.moments(name)
        ]
        if any(each.parameter.startswith(NUMBER) for each in out):
            raise NamesMoments.lacking(self)
        return out

    def parts(self) -> list[Part]:
        """See `flat_parts`."""
        with understood(self.path):
            if self._named:
                return list(flat_parts.named(self))
            return list(flat_parts.numbered(self, self._numbers()))

    def _numbers(self) -> dict[str, dict[int, list[int]]]:
        """Optimizer → number of each param group → the numbers of its parameters."""
        return {
            base: {int(g): list(self._value(names["params"])) for g, names in owners.items()}
            for base, owners in self._groups.items()
        }

    def shallow_globals(self) -> Mapping[str, frozenset[str]]:
        """Those of `.metadata`."""
        return {f"{self.path.name}/{self.saved.path.name}": self.saved.globals}

    def dialect(self) -> str:
        """What kind of checkpoint this is, in a few words."""
        kind = "fsdp_dtensor" if self._named else "torch_dcp"
        return f"megatron-lm · {kind} · {count(len(self.saved.items), 'value')}"


def opened_flat(folder: Path, step: int, without: Collection[Path] = ()) -> MegatronFlatCheckpoint:
    """Read `.metadata`; values are read when they are asked for."""
    saved = Saved.open(folder)
    return MegatronFlatCheckpoint(folder, step, {saved.path: Values(saved)}, {}, saved=saved)
