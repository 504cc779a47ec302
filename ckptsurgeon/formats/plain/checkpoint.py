"""A checkpoint of plain torch state dicts: optimizers, schedulers and gradient scalers in files.

What trainers share that save `optimizer.state_dict()` as it is; a format says which file has what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Key, Promise
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import Disagreement, Place, Setting, State, known_globals
from ckptsurgeon.formats.checkpoint import Shards, agree
from ckptsurgeon.formats.deepspeed import optimizer
from ckptsurgeon.formats.deepspeed.optimizer import Optimizer
from ckptsurgeon.formats.moments import ALL
from ckptsurgeon.formats.sane import UnknownField, understood
from ckptsurgeon.formats.schedules import annealing, torch

GROUPS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
ELSEWHERE = frozenset(
    {
        "clip_grad",
        "seed",
        "skip",
        "rewarm",
        "consumed_samples",
        "tokens",
        "iteration",
        "skipped_steps",
    }
)
"""What these trainers take from their command line, or count where no torch file is."""


@dataclass
class TorchCheckpoint(Shards):
    """One saved step. `optimizers` are (file, path of the state dict), `schedulers` files that hold
    a scheduler's state and nothing else, `scales` (file, path of the loss scale)."""

    optimizers: tuple[tuple[Path, tuple[Key, ...]], ...]
    schedulers: tuple[Path, ...] = ()
    scales: tuple[tuple[Path, tuple[Key, ...]], ...] = ()
    family: str = "torch"
    ranks: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        self._places: dict[str, list[Place]] = {}
        with understood(self.path):
            self._optimizers = [Optimizer(file, path, path) for file, path in self.optimizers]

    # --- places ----------------------------------------------------------------------------------

    def locate(self, name: str) -> list[Place]:
        """Every place of `name`. Raises UnknownField for a name that no format has."""
        if name not in self._places:
            with understood(self.path):
                self._places[name] = self._locate(name)
            self.check(name, self._places[name])
        return self._places[name]

    def _locate(self, name: str) -> list[Place]:
        if name == "scheduler":
            return [Place(file, (), self.trees[file]) for file in self.schedulers]
        if name == "position":
            return [p for file in self.schedulers for p in self.at(file, ("last_epoch",))]
        if name in GROUPS:
            wins = name != "lr" or self.groups_win
            return [
                place
                for item in self._optimizers
                for place in optimizer.groups(self, item, name, wins)
            ]
        if name == "adam_step":
            return [p for item in self._optimizers for p in optimizer.steps(self, item)]
        if name in ALL:
            return [p for item in self._optimizers for p in optimizer.moment(self, item, name)]
        if name == "loss_scale":
            return [place for file, path in self.scales for place in self.at(file, path)]
        if name in ELSEWHERE or name in annealing.NAMES:
            return []
        raise UnknownField(name)

    @property
    def groups_win(self) -> bool:
        """Whether the next step uses the lr of the param groups."""
        return True

    def schedule(self) -> Any:
        """The state of the first scheduler, or None."""
        return self.trees[self.schedulers[0]] if self.schedulers else None

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """torch's GradScaler begins at 65536 and counts the steps since the last change."""
        start = [(place, 65536.0) for place in self.locate("loss_scale")]
        for file, path in self.scales:
            start += [(place, 0) for place in self.at(file, (*path[:-1], "_growth_tracker"))]
        return start

    def reschedule(self, wanted: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """By the class of the saved scheduler; lr alone where none is saved."""
        with understood(self.path):
            schedule = self.schedule()
            if torch.is_torch(schedule):
                return torch.reschedule(self, wanted)
            if schedule is not None:
                raise SurgeryError(
                    "the scheduler's state is of no known class, so what it makes of an lr is "
                    "unknown",
                    next="set lr where the trainer makes its scheduler",
                )
            return annealing.reschedule(self, wanted)

    def contradictions(self) -> list[str]:
        """Fields that the optimizers of several files hold differently."""
        told = []
        for name in (*GROUPS, "adam_step", "loss_scale", "scheduler"):
            try:
                self.agreed(name)
            except Disagreement as error:
                told.append(error.what)
        return told

    # --- meaning ---------------------------------------------------------------------------------

    def iteration(self) -> int:
        """The updates that were made."""
        return self.step

    def notes(self) -> Iterator[str]:
        """What a reader of the promise must know."""
        if isinstance(schedule := self.schedule(), Mapping):
            yield from torch.notes(schedule)

    def scheduler(self) -> tuple[str, float | None]:
        """The schedule in words, and the rate that it decays from."""
        schedule = self.schedule()
        if torch.is_torch(schedule):
            peak = torch.peak(self) if self.locate("lr") else None
            return torch.words(schedule), peak
        if schedule is None:
            return "", max((float(place.value) for place in self.locate("lr")), default=None)
        return "an unknown schedule", None

    def state(self) -> State:
        """The promise of this checkpoint. Raises Disagreement with the files that differ."""
        with understood(self.path):
            return self._read_state()

    def _read_state(self) -> State:
        rates, betas, eps = (self.agreed(name) for name in ("lr", "betas", "eps"))
        decays, adam, scale = (
            self.agreed(name) for name in ("weight_decay", "adam_step", "loss_scale")
        )
        self.agreed("scheduler")
        notes = known_globals.notes(self.globals())
        if len(set(rates)) > 1:
            notes.append(f"param groups have different learning rates: {rates}")
        notes += self.notes()
        promise = Promise(
            step=self.iteration() + 1,
            lr=float(rates[0]) if rates else None,
            betas=(float(betas[0][0]), float(betas[0][1])) if betas else None,
            eps=float(eps[0]) if eps else None,
            weight_decay=tuple(float(value) for value in decays) or None,
            adam_step=int(max(adam)) if adam else None,
            loss_scale=float(scale[0]) if scale else 1.0,
            clip_grad=None,
            consumed_samples=None,
            skip=None,
            seed=None,
        )
        words, peak = self.scheduler()
        ranks = self.ranks[0] * self.ranks[1]
        return State(
            step=self.iteration(),
            promise=promise,
            schedule=None,
            dialect=f"{self.family} · {ranks} rank{'s' if ranks > 1 else ''}",
            data_parallel=self.ranks[0],
            model_parallel=self.ranks[1],
            dynamic_loss_scale=bool(scale),
            tokens=None,
            gigaflos=None,
            saved_at=max(path.stat().st_mtime for path in self.trees),
            notes=tuple(notes),
            peak_lr=peak,
            scheduler=words,
        )

    def agreed(self, name: str) -> list[Any]:
        """The values of `name` in the first file, equal in all files that have it. Parameters may
        differ in their Adam step: one that got no gradient did not step."""
        places = self.locate(name)
        if name != "adam_step":
            agree(name, places)
        else:
            tops: dict[Path, Any] = {}
            for place in places:
                tops[place.file] = max(tops.get(place.file, 0), place.value)
            agree(name, [Place(file, (), value) for file, value in tops.items()])
        return [place.value for place in places if place.file == places[0].file]
