"""One saved step of torchtitan or OLMo-core: where each field is kept, and what it means.

The optimizer is a flat dict, as torch flattens it: `<prefix>state.<parameter>.exp_avg`,
`<prefix>param_groups.<parameter or number>.lr`. Checked against torch's own reader and optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptsurgeon.edits import Promise
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Place, Setting, State, known_globals
from ckptsurgeon.formats.checkpoint import agree
from ckptsurgeon.formats.dcp.shards import DcpShards
from ckptsurgeon.formats.moments import ALL
from ckptsurgeon.formats.sane import UnknownField, understood

GROUP = ("lr", "initial_lr", "betas", "eps", "weight_decay")
NOWHERE = (
    "max_lr", "min_lr", "warmup", "decay", "decay_style", "clip_grad", "seed", "skip", "loss_scale",
    "consumed_samples", "group_step", "rewarm", "scheduler", "skipped_steps",
)  # fmt: skip
COUNTERS = {
    "iteration": ("train_state.step", "global_step"),
    "tokens": ("train_state.ntokens_seen", "global_train_tokens_seen"),
}
"""Field → its name among torchtitan's values, and in OLMo-core's `train/rank<R>.pt`."""


@dataclass
class DcpCheckpoint(DcpShards):
    """One step's folder. `flags` are the trainer's own, by recipe key."""

    trainer: str = field(kw_only=True)
    prefix: str = field(kw_only=True)
    flags: Mapping[str, str] = field(kw_only=True)

    def __post_init__(self) -> None:
        self._places: dict[str, list[Place]] = {}
        self._state: State | None = None
        pattern = re.compile(re.escape(self.prefix) + r"param_groups\.(.+)\.([a-z_]+)")
        self._groups: dict[str, list[str]] = {}
        for name in self.saved.items:
            if match := pattern.fullmatch(name):
                self._groups.setdefault(match[2], []).append(name)

    # --- places ----------------------------------------------------------------------------------

    def locate(self, name: str) -> list[Place]:
        """Every place of `name`; an empty list for what these trainers do not save."""
        if name not in self._places:
            with understood(self.path):
                self._places[name] = self._locate(name)
            self.check(name, self._places[name])
        return self._places[name]

    def _locate(self, name: str) -> list[Place]:
        if name in GROUP:
            wins = name != "lr" or self.trainer != "olmo-core"
            return [p for fqn in self._groups.get(name, ()) for p in self.scalar(fqn, wins)]
        if name == "adam_step":
            steps = re.compile(re.escape(self.prefix) + r"state\..+\.step")
            return [p for fqn in self.saved.items if steps.fullmatch(fqn) for p in self.scalar(fqn)]
        if name in ALL:
            inside = f"{self.prefix}state."
            names = [name, "momentum"] if name == "momentum_buffer" else [name]  # Dion's Muon
            found = [place for each in names for place in self.moments(each)]
            return [place for place in found if str(place.path[0]).startswith(inside)]
        if name in COUNTERS:
            value, key = COUNTERS[name]
            files = [place for file in self.archives for place in self.at(file, (key,))]
            return [*self.scalar(value), *files]
        if name in NOWHERE:
            return []
        raise UnknownField(name)

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """None: both train without a loss scale."""
        return []

    def reschedule(self, wanted: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """The groups' lr, and the rates that a saved LambdaLR computes from, all by one factor.

        Raises SurgeryError for what only the trainer's config decides: all of the schedule with
        OLMo-core, all but lr with torchtitan."""
        refused = [key for key in wanted if key != "lr" or self.trainer == "olmo-core"]
        if refused:
            told = ", ".join(sorted({self.flags[key] for key in refused}))
            raise SurgeryError(
                f"{self.trainer} computes the schedule from its own config at every step, so "
                f"{', '.join(sorted(refused))} has no place in a checkpoint",
                next=f"relaunch the trainer with {told}",
            )
        new, peak = float(wanted["lr"]), self._peak()
        if not peak:
            raise SurgeryError(
                "the learning rate that was saved is 0, so no factor leads to another",
                next=f"relaunch the trainer with {self.flags['lr']} {new:g}",
            )
        settings = [Setting("lr", p, p.value * (new / peak)) for p in self.locate("lr")]
        settings += [
            Setting("lr", p, _scaled(p.value, new / peak)) for p in self.locate("initial_lr")
        ]
        kept = self.scalar("lr_scheduler.base_lrs")
        for place in (*kept, *self.scalar("lr_scheduler._last_lr")):
            settings.append(Setting("lr", place, [_scaled(v, new / peak) for v in place.value]))
        if kept:
            return settings, []
        return settings, [
            f"this version of {self.trainer} saves no base_lrs: the next step uses the new lr, "
            f"and from the one after it only {self.flags['lr']} {new:g} does (where its config has "
            "optimizer.param_groups: the lr there)"
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
        out = []
        for name in (*GROUP, "adam_step", "iteration", "tokens"):
            try:
                places = self.locate(name)
                if name in COUNTERS:
                    agree(name, places)
            except SurgeryError as error:
                out.append(error.what)
                continue
            if name == "iteration" and places and places[0].value != self.step:
                # `set iteration` leaves Adam's step; a checkpoint of another step has its own.
                taken = {place.value for place in self.locate("adam_step")}
                if not taken or places[0].value in taken:
                    out.append(f"{self.path.name}: holds step {places[0].value}")
        return out

    def state(self) -> State:
        """The promise of this checkpoint. Raises Disagreement with the files that differ."""
        if self._state is None:
            with understood(self.path):
                self._state = self._read_state()
        return self._state

    def _read_state(self) -> State:
        rates = self._values("lr")
        if not rates:
            raise SurgeryError(
                f"{self.path.name} keeps no optimizer: it holds the model alone",
                next="ckptsurgeon status    a step that has one",
            )
        for name in COUNTERS:
            agree(name, self.locate(name))
        iteration, tokens = self.locate("iteration"), self.locate("tokens")
        step = int(iteration[0].value) if iteration else self.step
        betas, eps = self._values("betas"), self._values("eps")
        adam = [place.value for place in self.locate("adam_step")]
        epochs = self.scalar("lr_scheduler.last_epoch")
        files = (path.stat().st_mtime for path in (self.saved.path, *self.archives))
        promise = Promise(
            step=step + 1,
            lr=float(rates[0]),
            betas=(float(betas[0][0]), float(betas[0][1])) if betas else None,
            eps=float(eps[0]) if eps else None,
            weight_decay=tuple(float(value) for value in self._values("weight_decay")) or None,
            adam_step=int(max(adam)) if adam else None,
            loss_scale=1.0,
            clip_grad=None,
            consumed_samples=None,
            skip=None,
            seed=None,
        )
        return State(
            step=step,
            promise=promise,
            schedule=None,
            dialect=f"{self.trainer} · torch dcp · {len(self.saved.items)} values",
            data_parallel=max(1, len(self.archives)),
            model_parallel=1,
            dynamic_loss_scale=False,
            tokens=int(tokens[0].value) if tokens else None,
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
                f"lr is what the last step used: the trainer computes it anew from "
                f"{self.flags['lr']} before every step"
            )
        elif len(rates) > 1:
            notes.append(f"parameters have different learning rates: {rates}")
        return notes

    def _values(self, name: str) -> list[Any]:
        """The different values of a field of the groups, in the order of the parameters."""
        return list(dict.fromkeys(_key(place.value) for place in self.locate(name)))


def _scaled(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, (int, float)) else value


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
