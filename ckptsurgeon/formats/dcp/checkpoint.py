"""One saved step of torchtitan or OLMo-core: where each field is kept, and what it means.

The optimizer is a flat dict, as torch flattens it: `<prefix>state.<parameter>.exp_avg`,
`<prefix>param_groups.<parameter or number>.lr`. Checked against torch's own reader and optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptsurgeon.edits import Caveat, Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats import known_globals
from ckptsurgeon.formats.checkpoint import agree
from ckptsurgeon.formats.dcp.shards import DcpShards
from ckptsurgeon.formats.moments import ALL
from ckptsurgeon.formats.optimizers.table import COUNTED
from ckptsurgeon.formats.protocol import Place, Setting, State, StateDict

GROUP = ("lr", "initial_lr", "betas", "eps", "weight_decay")
COUNTERS = {
    "iteration": ("train_state.step", "global_step"),
    "tokens": ("train_state.ntokens_seen", "global_train_tokens_seen"),
}
"""Field → its name among torchtitan's values, and in OLMo-core's `train/rank<R>.pt`."""


@dataclass
class DcpCheckpoint(DcpShards):
    """One step's folder. `options` are those of the trainer's config, by key of a recipe."""

    trainer: str = field(kw_only=True)
    prefix: str = field(kw_only=True)
    options: Mapping[str, str] = field(kw_only=True)

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
            wins = field != "lr" or self.trainer != "olmo-core"
            return [p for fqn in self._groups.get(field, ()) for p in self.scalar(fqn, wins)]
        if field == "adam_step":
            steps = re.compile(re.escape(self.prefix) + r"state\..+\.step")
            return [p for fqn in self.saved.items if steps.fullmatch(fqn) for p in self.scalar(fqn)]
        if field in ALL:
            inside = f"{self.prefix}state."
            names = [field, "momentum"] if field == "momentum_buffer" else [field]  # Dion's Muon
            places = [place for each in names for place in self.moments(each)]
            return [place for place in places if str(place.path[0]).startswith(inside)]
        if field in COUNTERS:
            value, key = COUNTERS[field]
            files = [place for file in self.archives for place in self.at(file, (key,))]
            return [*self.scalar(value), *files]
        return []

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
        inside = f"{self.prefix}param_groups."
        return [
            ((name.removeprefix(inside).removesuffix(f".{key}"),), place)
            for name in self._groups.get(key, ())
            for place in self.scalar(name)
        ]

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
                owner = name.removeprefix(f"{self.prefix}param_groups.").removesuffix(f".{key}")
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
        for key, names in self._groups.items():
            own = {f"{self.prefix}param_groups.{owner}.{key}" for owner in owners}
            mine = [name for name in names if name in own]
            read = mine if key in COUNTED else mine[:1]
            places = [place for name in read for place in self.scalar(name)]
            if places:
                group[key] = places
        return StateDict(self.saved.path, state, group)

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Both train without a loss scale."""
        return []

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """The groups' lr, and the rates that a saved LambdaLR computes from, all by one factor.

        Raises SurgeryError for what only the trainer's config decides: all of the schedule with
        OLMo-core, all but lr with torchtitan."""
        refused = [key for key in values if key != "lr" or self.trainer == "olmo-core"]
        if refused:
            flags = ", ".join(sorted({self.options[key] for key in refused}))
            raise SurgeryError(
                f"{self.trainer} computes the schedule from its own config at every step, so "
                f"{', '.join(sorted(refused))} has no place in a checkpoint",
                next=f"relaunch the trainer with {flags}",
            )
        new, peak = float(values["lr"]), self._peak()
        if not peak:
            raise SurgeryError(
                "the learning rate that was saved is 0, so no factor leads to another",
                next=f"relaunch the trainer with {self.options['lr']} {new:g}",
            )
        settings = [Setting("lr", p, p.value * (new / peak)) for p in self.locate("lr")]
        settings += [
            Setting("lr", p, _scaled(p.value, new / peak)) for p in self.locate("initial_lr")
        ]
        bases = self.scalar("lr_scheduler.base_lrs")
        for place in (*bases, *self.scalar("lr_scheduler._last_lr")):
            settings.append(Setting("lr", place, [_scaled(v, new / peak) for v in place.value]))
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

    def _peak(self) -> float:
        """What the schedule is a factor of."""
        bases = self.scalar("lr_scheduler.base_lrs")
        rates = [rate for place in bases for rate in place.value]
        rates = rates or [place.value for place in self.locate("initial_lr")]
        return float(max(rates or [place.value for place in self.locate("lr")]))

    # --- meaning ---------------------------------------------------------------------------------

    def contradictions(self) -> list[str]:
        """Counters that differ between ranks, or from the folder's name; impossible numbers."""
        out: list[str] = []
        for name in (*GROUP, "adam_step", "iteration", "tokens"):
            try:
                places = self.locate(name)
                if name in COUNTERS:
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
        if field in COUNTERS:
            return super().agreed(field)
        return list(dict.fromkeys(_key(place.value) for place in self.locate(field)))

    def read_state(self) -> State:
        """The lr is that of the first parameter."""
        rates = self.agreed("lr")
        if not rates:
            raise SurgeryError(
                f"{self.path.name} keeps no optimizer: it holds the model alone",
                next="ckptsurgeon status    a step that has one",
            )
        iteration, tokens = self.agreed("iteration"), self.agreed("tokens")
        step = int(iteration[0]) if iteration else self.step
        epochs = self.scalar("lr_scheduler.last_epoch")
        files = (path.stat().st_mtime for path in (self.saved.path, *self.archives))
        return State(
            step=step,
            promise=self.promise(step, float(rates[0])),
            schedule=None,
            dialect=f"{self.trainer} · torch dcp · {len(self.saved.items)} values",
            data_parallel=max(1, len(self.archives)),
            model_parallel=1,
            dynamic_loss_scale=False,
            tokens=int(tokens[0]) if tokens else None,
            gigaflos=None,
            saved_at=max(files),
            notes=tuple(self._notes(rates)),
            peak_lr=self._peak(),
            scheduler=f"at step {epochs[0].value} of a schedule in the config" if epochs else "",
        )

    def _notes(self, rates: list[Any]) -> list[str]:
        notes = known_globals.notes({self.saved.path.name: self.saved.globals})
        if self.trainer == "olmo-core":
            notes.append(
                Caveat(
                    "lr is what the last step used: the trainer computes it anew from "
                    f"{self.options['lr']} before every step",
                    "lr",
                    known=False,
                )
            )
        elif len(rates) > 1:
            notes.append(f"parameters have different learning rates: {rates}")
        return notes


def _scaled(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, (int, float)) else value


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
