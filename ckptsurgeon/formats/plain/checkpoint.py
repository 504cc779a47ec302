"""A checkpoint of plain torch state dicts: optimizers, schedulers and gradient scalers in files.

What trainers share that save `optimizer.state_dict()` as it is; a format says which file has what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon.errors import count
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats.capabilities import NamesGroups, NamesMoments, Repeats
from ckptsurgeon.formats.fields import known_globals
from ckptsurgeon.formats.fields.columns import Column, Places
from ckptsurgeon.formats.fields.constants import GROUP
from ckptsurgeon.formats.fields.understood import of_field, said_in, understood
from ckptsurgeon.formats.fields.values import (
    Located,
    Part,
    Place,
    State,
    StateDict,
)
from ckptsurgeon.formats.optimizers.state_dict import state_dict
from ckptsurgeon.formats.places import optimizer_state
from ckptsurgeon.formats.places.json_beside import JsonBeside
from ckptsurgeon.formats.places.moments import ALL
from ckptsurgeon.formats.plain import parts
from ckptsurgeon.formats.schedules import saved
from ckptsurgeon.formats.schedules.torch_schedulers import NOT_KNOWN, TorchSchedulers
from ckptsurgeon.plans.edits import Key


@dataclass
class TorchCheckpoint(TorchSchedulers, JsonBeside, NamesGroups, NamesMoments, Repeats):
    """One saved step. `optimizers` are (file, path of the state dict), `schedulers` (file, path of
    a scheduler's state), `scales` (file, path of the loss scale), `weights_at` (file, path of a
    dict of weights by name). `repeated` are `copies`."""

    optimizers: tuple[Located, ...]
    schedulers: tuple[Located, ...] = ()
    scales: tuple[Located, ...] = ()
    family: str = "torch"
    ranks: tuple[int, int] = (1, 1)
    weights_at: tuple[Located, ...] = ()
    repeated: Mapping[Path, Path] = field(default_factory=dict)

    growth: ClassVar[Mapping[str, int]] = {"_growth_tracker": 0}
    loose: ClassVar[bool] = False
    """Whether the trainer loads an optimizer that has no state for its parameters."""

    # --- places ----------------------------------------------------------------------------------

    def find(self, field: str) -> Sequence[Place]:
        """In the optimizers, schedulers and gradient scalers. The rest these trainers take from
        their command line, or count where no torch file is."""
        if field in GROUP:
            wins = field != "lr" or self.groups_win
            return [
                place for item in self.optimizers for place in self._in_groups(item, field, wins)
            ]
        if field in ALL:
            return Places(c for item in self.optimizers for c in self._moment(item, field))
        if field == "adam_step":
            return Places(column for item in self.optimizers for column in self._steps(item))
        if field == "loss_scale":
            return self.below(self.scales)
        return self.of_schedulers(field)

    def _in_groups(self, item: Located, name: str, wins: bool) -> Iterator[Place]:
        return optimizer_state.groups(self, *item, name, wins)

    def _moment(self, item: Located, name: str) -> Sequence[Column]:
        states = optimizer_state.states(self, *item)
        return optimizer_state.moment(self, item[0], states, name)

    def _steps(self, item: Located) -> list[Column]:
        """Of the groups where no state has one, as apex keeps it."""
        columns = optimizer_state.steps(self, item[0], optimizer_state.states(self, *item))
        groups = self._in_groups(item, "step", not columns)
        return [*columns, *(Column.of(place) for place in groups if place.value is not None)]

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """By `param_names`, which torch saves of an optimizer that was made of named parameters."""
        out = []
        for place in self.settings(key):
            names = self.value(place.file, (*place.path[:-1], "param_names"))
            if not isinstance(names, (list, tuple)):
                raise NamesGroups.lacking(self)
            out.append((tuple(str(name) for name in names), place))
        return out

    def fragments(self, name: str) -> list[Part]:
        """By the names of the parameters, where the file has those of all."""
        fragments: list[Part] = []
        with understood(self.path):
            for place, parameter in self._owned(name):
                if parameter is None:
                    raise NamesMoments.lacking(self)
                size = place.value.numel if isinstance(place.value, Tensor) else 0
                fragments.append(Part(parameter, "", name, place, 0, size, 0))
        return fragments

    def _owned(self, name: str) -> Iterator[tuple[Place, str | None]]:
        """Each place of a moment, and the parameter that all of it is of, where its file says."""
        for item in self.optimizers:
            file, base = item
            names = self.named(item)
            for place in Places(c for c in self._moment(item, name) if c.file == file):
                whole = len(place.path) == len(base) + 3 and place.path[-1] == name
                yield place, names.get(place.path[-2]) if whole else None

    def named(self, item: Located) -> Mapping[Key, str]:
        """The key of a state in one optimizer → its parameter, where the file says so."""
        file, base = item
        return parts.named(get(self.trees[file], base))

    def parts(self) -> list[Part]:
        """The weights are their own masters; moments whose parameters no file names go by their
        numbers."""
        with understood(self.path):
            found = list(self.weight_parts())
            sizes: dict[str, dict[str, int]] = {}
            for part in found:
                sizes.setdefault(part.cut, {})[part.parameter] = part.end
            cuts = parts.cuts(self.optimizers, self.repeated)
            several = len(cuts) > self.ranks[0] * self.ranks[1]
            for item, cut in cuts.items():
                numbered = f"{{}} of optimizer {cut}" if several else "{}"
                names = self.named(item)
                found += parts.moments(self, item, cut, names, sizes.get(cut, {}), numbered)
        return found

    def weight_parts(self) -> Iterator[Part]:
        """Of the dicts that are known to hold weights."""
        for item, cut in parts.cuts(self.weights_at, self.repeated).items():
            yield from parts.weights(parts.in_tree(self, item), cut)

    def copies(self) -> Mapping[Path, Path]:
        """As the layout found them."""
        return self.repeated

    def state_dicts(self) -> list[StateDict]:
        """One for each optimizer."""
        with understood(self.path):
            return [
                state_dict(file, path, get(self.trees[file], path), loose=self.loose)
                for file, path in self.optimizers
            ]

    def headers(self) -> list[StateDict]:
        """Without those of copies, which come and go with the step that a restart loads."""
        return [each for each in self.state_dicts() if each.file not in self.repeated]

    def deciding(self, field: str) -> Sequence[Place]:
        """Every place: what a load replaces is all that is known of an lr. Parameters may differ in
        their Adam step, as one that got no gradient did not step: the largest of a file counts."""
        places = self.locate(field)
        if field != "adam_step":
            return places
        tops: dict[Path, Any] = {}
        for column in Places.of(places).columns:
            tops[column.file] = max(tops.get(column.file, 0), *column.values)
        return [Place(file, (), value) for file, value in tops.items()]

    @property
    def groups_win(self) -> bool:
        """Whether the next step uses the lr of the param groups."""
        return True

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Of torch's GradScaler."""
        return saved.scaler_start(self, self.scales)

    def several(self) -> int:
        """How many optimizers there are: those in one file, as each rank may have a file."""
        return len({path for _, path in self.optimizers})

    def contradictions(self) -> list[str]:
        """Fields that the optimizers of several files hold differently."""
        sentences: list[str] = []
        for name in (*GROUP, "adam_step", "loss_scale", "scheduler"):
            with said_in(sentences), of_field(name), understood(self.path):
                self.agreed(name)
        return sentences

    # --- meaning ---------------------------------------------------------------------------------

    def iteration(self) -> int:
        """The updates that were made."""
        return self.step

    def batch_size(self) -> int | None:
        """The samples of an iteration, where a file says it."""
        return None

    def notes(self) -> Iterator[str]:
        """What a reader of the promise must know."""
        yield from self.on_schedule()

    def read_state(self) -> State:
        """The lr is that of the first param group."""
        rates = self.rates()
        step = self.where_clear("iteration", self.iteration, self.step)
        promise = self.promise(step, rates[0] if rates else None)
        self.clear("scheduler")
        notes = known_globals.notes(self.globals())
        if len(set(rates)) > 1:
            notes.append(f"param groups have different learning rates: {rates}")
        notes += self.where_clear("scheduler", lambda: [*self.notes()], [])
        words, peak = self.where_clear("scheduler", self.in_words, NOT_KNOWN)
        ranks = self.ranks[0] * self.ranks[1]
        return State(
            step=step,
            promise=promise,
            schedule=None,
            dialect=f"{self.family} · {count(ranks, 'rank')}",
            data_parallel=self.ranks[0],
            model_parallel=self.ranks[1],
            dynamic_loss_scale=bool(self.clear("loss_scale")),
            tokens=None,
            gigaflos=None,
            saved_at=max(path.stat().st_mtime for path in self.archives),
            notes=tuple(notes),
            peak_lr=peak,
            scheduler=words,
            batch_size=self.where_clear("batch_size", self.batch_size, None),
        )
