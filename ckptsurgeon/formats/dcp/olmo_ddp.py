"""One saved step of OLMo-core's OLMoDDPTrainModule: masters and moments, each parameter flat.

Source: `olmo_core/optim/moe_optimizer.py` (state_dict), `ddp_train_module.py`, 3.0.0. There are no
param groups: lr, betas, eps and weight decay come from the config at every launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.formats.dcp.olmo_core import OlmoCoreCheckpoint
from ckptsurgeon.formats.dcp.optimizer import Optimizer, Paths
from ckptsurgeon.formats.fields.understood import mapping
from ckptsurgeon.formats.fields.values import MOMENTS, Part, Place, Setting, StateDict, Weight

MASTER = "main"
RESETS = ("reset_optimizer_states_on_resume", "reset_optimizer_states_on_load")
"""Keys of the config's train module with which a resume loads the masters alone."""


def is_flat(saved: Saved) -> bool:
    """Whether the optimizer of this folder has masters by the names of the parameters."""
    return any(name.endswith(f".{MASTER}") for name in saved.items) and not any(
        name.startswith("optim.") for name in saved.items
    )


class FlatOptimizer(Optimizer):
    """`<parameter>.{exp_avg,exp_avg_sq,step}`, beside its master. Buffers of the model, and the
    losses that decide which steps are left out, have none."""

    def __init__(self, saved: Saved) -> None:
        super().__init__(saved, "")
        ends = {name: name.rpartition(".") for name in saved.items}
        owners = {owner for owner, _, key in ends.values() if key == MASTER}
        self.names = {
            name: (owner, key)
            for name, (owner, _, key) in ends.items()
            if owner in owners and key != MASTER
        }
        self.masters = {f"{owner}.{MASTER}": owner for owner in owners}

    def has(self, name: str) -> bool:
        """As a part of a parameter's state."""
        return name in self.names

    def steps(self) -> Iterator[str]:
        """The name of each parameter's step."""
        return (name for name, (_, key) in self.names.items() if key == "step")

    def states(self) -> dict[str, dict[str, Paths]]:
        """Without the master, which is the parameter itself."""
        states: dict[str, dict[str, Paths]] = {}
        for name, (owner, key) in self.names.items():
            states.setdefault(owner, {})[key] = self.saved.paths(name)
        return states


@dataclass
class OlmoDdpCheckpoint(OlmoCoreCheckpoint):
    """Counters, config and schedule are those of every OLMo-core run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.flat = FlatOptimizer(self.saved)
        self.optimizers = [self.flat]

    @property
    def has_optimizer(self) -> bool:
        """By the steps of its parameters."""
        return any(True for each in self.optimizers for _ in each.steps())

    def find(self, field: str) -> list[Place]:
        """The step counts where the config does not begin it anew."""
        places = super().find(field)
        if field == "adam_step" and self._begun_anew():
            return [place._replace(wins=False) for place in places]
        return places

    def alike(self, field: str) -> list[Sequence[Place]]:
        """Of Adam's step none where a resume begins it anew."""
        return [] if field == "adam_step" and self._begun_anew() else super().alike(field)

    def _begun_anew(self) -> list[str]:
        return [key for key in RESETS if self._module.get(key) is True]

    def _state_dict(self, *of: Any) -> StateDict:
        """With settings as the config has them, by which the optimizer is known for Adam."""
        optim = mapping(self._module.get("optim"))
        group = {key: [Place(self.saved.path, (), optim.get(key))] for key in ("betas", "eps")}
        return super()._state_dict(*of)._replace(group=group)

    def parts(self) -> list[Part]:
        """The master is the weight: a load copies it to the model. No shape is saved, so no box."""
        kinds = {name: (owner, "weights") for name, owner in self.flat.masters.items()}
        kinds |= {name: each for name, each in self.flat.names.items() if each[1] in MOMENTS}
        return [
            part._replace(box=None)
            for name, (owner, kind) in kinds.items()
            for part in self.chunks(self.saved, name, owner, kind)
        ]

    def weights(self) -> Iterator[Weight]:
        """Refused: no shape of a parameter is saved."""
        raise SurgeryError(
            f"{self.path.name} keeps its weights flat, without their shapes",
            next="load the step with OLMo-core and save the model with it",
        )

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """Refused: the config decides all of it."""
        raise SurgeryError(
            f"{self.path.name} keeps no param groups (OLMoDDP), so {', '.join(sorted(values))} has "
            "no place in it",
            next=f"relaunch the trainer with {self.flags(values)}",
        )

    def peak(self) -> float | None:
        """What the config begins with."""
        rate = mapping(self._module.get("optim")).get("lr")
        return float(rate) if isinstance(rate, (int, float)) else None

    def next_rate(self) -> float | None:
        """What the config says; without a scheduler it holds."""
        return super().next_rate() if self._schedule else self.peak()

    def notes(self) -> list[str]:
        """Also what a resume throws away."""
        notes = [
            *super().notes(),
            "OLMoDDP keeps no lr, betas, eps or weight decay: the config of the relaunch has them",
        ]
        if keys := self._begun_anew():
            notes.append(
                f"train_module.{keys[0]}=true: a resume begins the moments and their steps anew"
            )
        if mapping(self._module.get("optim")).get("reset_optimizer_moments_on_load") is True:
            notes.append(
                "train_module.optim.reset_optimizer_moments_on_load=true: a resume zeroes the "
                "moments, and goes on with their steps"
            )
        return notes
