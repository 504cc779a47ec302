"""One saved step of a described trainer whose optimizer is Megatron-core's, saved as torch_dist.

The trainer drives it with torch's schedulers, not with Megatron's: the first update takes rate and
weight decay from the param groups, and the scheduler's state in the common state says what comes
after. `max_lr` and `min_lr` in the groups only name them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.described.description import COUNTERS, Description
from ckptsurgeon.formats.described.savers import Saving
from ckptsurgeon.formats.fields import known_globals
from ckptsurgeon.formats.fields.values import Located, Place, State
from ckptsurgeon.formats.megatron.dist import GROUPS, MegatronDistCheckpoint
from ckptsurgeon.formats.megatron.shards import Optimizer
from ckptsurgeon.formats.schedules.torch_schedulers import NOT_KNOWN, TorchSchedulers
from ckptsurgeon.hints import command

CHAINED = re.compile(r"chained_(\d+)\.")
ELSEWHERE = (
    "max_lr", "min_lr", "warmup", "decay", "decay_style", "clip_grad", "seed", "batch_size",
    "rampup",
)  # fmt: skip
"""Fields that Megatron-LM keeps in its own scheduler's state and in its args."""


@dataclass
class DescribedMegatron(Saving, TorchSchedulers, MegatronDistCheckpoint):
    """`schedulers` and `savers` are (file, key path) in the common state, `counters` by name."""

    by_name: ClassVar[str] = (
        "save the step once fully reshardable: in NeMo 2.6 and newer by "
        "MegatronStrategy(ckpt_optim_fully_reshardable=True)"
    )

    description: Description = field(kw_only=True)
    schedulers: tuple[Located, ...] = ()
    counters: Mapping[str, tuple[Located, ...]] = field(default_factory=dict)
    savers: tuple[Located, ...] = ()

    # --- places ----------------------------------------------------------------------------------

    def find(self, field: str) -> list[Place]:
        """Lr and weight decay of the groups win: no scheduler writes them before an update."""
        if field in ("scheduler", "position"):
            return self.of_schedulers(field)
        if field in COUNTERS:
            return self.below(self.counters.get(field, ()))
        if field in ("lr", "weight_decay"):
            return self.in_groups(field, wins=True)
        return [] if field in ELSEWHERE else super().find(field)

    def group_of(self, place: Place) -> int:
        """Its number among those of all optimizers of a chain, as the scheduler counts. What each
        model-parallel rank saved of an optimizer is one."""
        owner = next(i for i in self.optimizers() if place.path[: len(i.base)] == i.base)
        counts = {_chained(item): len(self.groups(item)) for item in self.optimizers()}
        before = (count for name, count in counts.items() if name < _chained(owner))
        return sum(before) + int(place.path[-2])

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """The value: the trainer scales none by a group."""
        return value

    # --- meaning ---------------------------------------------------------------------------------

    @property
    def asked(self) -> bool:
        """By its page."""
        return bool(self.description.witness)

    def read_state(self) -> State:
        """The lr is that of the first param group, which the trainer logs."""
        if not self.all_groups():
            raise SurgeryError(
                f"{self.path.name} keeps no optimizer: it holds the model alone",
                next=command("status", why="a step that has one"),
            )
        for name in ("weight_decay", "consumed_samples"):
            self.clear(name)
        rates = self.rates()
        words, peak = self.where_clear("scheduler", self.in_words, NOT_KNOWN)
        tokens = self.clear("tokens")
        return State(
            step=self.step,
            promise=self.promise(self.step, rates[0] if rates else None),
            schedule=None,
            dialect=self.dialect(),
            data_parallel=1,
            model_parallel=1,
            dynamic_loss_scale=bool(self.clear("loss_scale")),
            tokens=int(tokens[0]) if tokens else None,
            gigaflos=None,
            saved_at=max(path.stat().st_mtime for path in (*self.archives, self.saved.path)),
            notes=tuple(self._notes(rates)),
            peak_lr=peak,
            scheduler=words,
        )

    def _notes(self, rates: Sequence[float]) -> list[str]:
        notes = known_globals.notes(self.shallow_globals())
        if len(set(rates)) > 1:
            notes.append(f"param groups have different learning rates: {list(rates)}")
        return [*notes, *self.on_schedule(), *self.description.doubts()]

    def dialect(self) -> str:
        """What kind of checkpoint this is, in a few words."""
        return super().dialect().replace("megatron-lm", self.description.name)


def _chained(item: Optimizer) -> int:
    """Which optimizer of a chain it is, whatever rank saved it."""
    name = str(item.base[0])
    if match := CHAINED.match(name):
        return int(match[1])
    return 0 if GROUPS.fullmatch(name) else [key for key in item.base if isinstance(key, int)][-1]
