"""One saved step: what may be asked of it in every format, and what all families answer alike.

`capabilities` has what only some of them can do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, final

from ckptsurgeon.errors import Impossible, NotUnderstood, SurgeryError
from ckptsurgeon.formats.fields.columns import Places
from ckptsurgeon.formats.fields.constants import GROUP
from ckptsurgeon.formats.fields.names import FIELDS
from ckptsurgeon.formats.fields.trees import Trees
from ckptsurgeon.formats.fields.understood import of_field, understood
from ckptsurgeon.formats.fields.values import Part, Place, Setting, State, StateDict
from ckptsurgeon.formats.optimizers import param_groups
from ckptsurgeon.formats.optimizers.table import TABLE, Known
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.promise import Promise

T = TypeVar("T")


@dataclass
class Checkpoint(Trees, ABC):
    """One saved step, its shards' trees read once. A family says by `find` where a field is, by
    `read_state` what it means, by `parts` whose each tensor is, and by `reschedule` and
    `scaler_start` what to write; it overrides of the rest what differs."""

    known: Known = field(default=TABLE, kw_only=True)
    """What is known of its optimizers."""

    growth: ClassVar[Mapping[str, int]] = {}
    """Counters beside a loss scale that its next growth is taken from → their start."""

    @property
    def numbered(self) -> bool:
        """Whether the number of the step counts updates, as the trainer saved it."""
        return True

    def outrun(self) -> bool:
        """Whether the optimizer made more updates than the name of the step says, which then counts
        epochs or saves: 16-bit wrappers make one more. A counter beside it has the last word."""
        if self.locate("iteration"):
            return False
        made = self.clear("adam_step")
        return bool(made) and max(made) > self.step + 1

    @property
    def unable(self) -> Collection[type]:
        """The `capabilities` of its class that this one lacks."""
        return ()

    def __post_init__(self) -> None:
        self._places: dict[str, Sequence[Place]] = {}
        self._state: State | None = None
        self.unclear: dict[str, str] = {}
        """Field → why the state does not say it."""
        self.impossible: list[str] = []
        """Of these, what no trainer goes on with."""

    # --- fields ----------------------------------------------------------------------------------

    @abstractmethod
    def find(self, field: str) -> Sequence[Place]:
        """Every place of `field`, as the files have it; an empty list when it is kept nowhere.
        What it stumbles over is an error of the file."""

    def locate(self, field: str) -> Sequence[Place]:
        """Every place that `field`, one of `fields.FIELDS`, is kept in, in every shard; an empty
        list when it is kept nowhere. Raises NotUnderstood for a value that it can't have."""
        assert field in FIELDS, f"no field is called {field}"
        if field not in self._places:
            with of_field(field), understood(self.path):
                places = self.find(field)
            self.check(field, places)
            self._places[field] = places
        return self._places[field]

    def deciding(self, field: str) -> Sequence[Place]:
        """The places that must agree: those that win. Adam's step is one number, wherever it is."""
        if field != "adam_step":
            return [place for place in self.locate(field) if place.wins]
        columns = (column for column in Places.of(self.locate(field)).columns if column.wins)
        steps = ((column.file, step) for column in columns for step in dict.fromkeys(column.values))
        return [Place(file, (), step) for file, step in dict.fromkeys(steps)]

    def alike(self, field: str) -> list[Sequence[Place]]:
        """The places that decide, in lists of which each must agree in itself."""
        return [self.deciding(field)]

    def varies(self, field: str) -> bool:
        """Whether each parameter may have a value of its own: every different one counts once."""
        return False

    @final
    def agreed(self, field: str) -> list[Any]:
        """The values of `field` that decide."""
        values = [place.value for place in self.used(field)]
        if not self.varies(field):
            return values
        return list(dict.fromkeys(tuple(v) if isinstance(v, list) else v for v in values))

    def used(self, field: str) -> list[Place]:
        """The places of `field` that decide, in the first file, or the first one of each list. No
        step uses the settings of a param group without parameters. Raises Disagreement when
        another file has others."""
        every: list[Place] = []
        used: list[Place] = []
        for places in self.alike(field):
            agree(field, places)
            own = [place for place in places if place.file == places[0].file]
            every += own
            used += self._with_parameters(own, places) if field in GROUP else own
        return used or every  # a shard of ZeRO 3 empties its lists

    def _with_parameters(self, own: list[Place], places: Sequence[Place]) -> list[Place]:
        """Those of `own` whose param group has a parameter in one of the files; none where none
        says that it has one."""

        def is_empty(place: Place) -> bool:
            held = self.value(place.file, self.beside(place, "params"))
            return isinstance(held, (list, tuple)) and not held

        bare = {place.path for place in own if is_empty(place)}
        if len(bare) == len(own):
            return []
        if bare:
            bare -= {p.path for p in places if p.path in bare and not is_empty(p)}
        return [place for place in own if place.path not in bare]

    def clear(self, field: str) -> list[Any]:
        """What is `agreed`; nothing where it is not understood, which the state then says."""
        return self.where_clear(field, lambda: self.agreed(field), [])

    def where_clear(self, field: str, read: Callable[[], T], other: T) -> T:
        """What `read` gives; `other` where that is not understood, which the state then says."""
        try:
            with of_field(field), understood(self.path):
                return read()
        except NotUnderstood as error:
            self.unclear.setdefault(field, error.what)
            if isinstance(error, Impossible):
                self.impossible.append(error.what)
            return other

    # --- meaning ---------------------------------------------------------------------------------

    @abstractmethod
    def read_state(self) -> State:
        """The state, from what `clear` and `promise` say. What raises NotUnderstood here makes
        all of it not understood."""

    def state(self) -> State:
        """What is in the checkpoint. Raises Disagreement with the files that differ."""
        if self._state is None:
            try:
                with understood(self.path):
                    state = self.read_state()
            except NotUnderstood as error:
                self.unclear.setdefault("state", error.what)
                state = self.unread()
            notes = (*state.notes, *dict.fromkeys(self.unclear.values()))
            promise = replace(
                state.promise.with_caveats(notes),
                not_understood=dict(self.unclear),
                asked=self.asked,
            )
            self._state = replace(state, promise=promise, notes=notes)
        return self._state

    def unread(self) -> State:
        """A state of which nothing is known but the step."""
        return State(
            step=self.step,
            promise=Promise.unknown(self.step + 1),
            schedule=None,
            dialect="what it holds is not understood",
            data_parallel=1,
            model_parallel=1,
            dynamic_loss_scale=False,
            tokens=None,
            gigaflos=None,
            saved_at=max((a.status.st_mtime for a in self.archives.values()), default=0.0),
        )

    def rates(self) -> list[float]:
        """The lr of each param group, without those that are None: their optimizer computes one."""
        return [float(rate) for rate in self.clear("lr") if rate is not None]

    def promise(self, step: int, lr: float | None) -> Promise:
        """What the step after `step` will use: `lr`, and of every other field what is agreed."""
        none: list[StateDict] = []
        headers = self.where_clear("optimizer", self.headers, none)
        name = self.where_clear("optimizer", lambda: param_groups.named(headers, self.known), "")
        betas, eps = self.clear("betas"), self.clear("eps")
        decays, adam = self.clear("weight_decay"), self.clear("adam_step")
        scale, clip = self.clear("loss_scale"), self.clear("clip_grad")
        samples, seed, skip = (self.clear(n) for n in ("consumed_samples", "seed", "skip"))
        epoch, batches = self.clear("data_epoch"), self.clear("data_batches")
        ranges = skip[0] if skip else None
        return Promise(
            step=step + 1,
            lr=lr,
            betas=param_groups.rates(betas[0]) if betas else None,
            eps=param_groups.epsilon(eps[0]) if eps else None,
            weight_decay=tuple(float(value) for value in decays) or None,
            adam_step=int(max(adam)) if adam else None,
            loss_scale=float(scale[0]) if scale else 1.0,
            clip_grad=float(clip[0]) if clip else None,
            consumed_samples=int(samples[0]) if samples else None,
            skip=None if ranges is None else tuple((int(a), int(b)) for a, b in ranges),
            seed=int(seed[0]) if seed else None,
            optimizer=name or None,
            groups=self.where_clear("betas", self._pairs, None),
            settings=param_groups.numbers(headers) or None,
            data_epoch=int(epoch[0]) if epoch else None,
            data_batches=int(batches[0]) if batches else None,
        )

    def _pairs(self) -> param_groups.Pairs | None:
        """Betas and eps of each param group that has one of them, or None where all have the same.
        Of settings that each parameter has for itself, every different pair counts once."""
        if not param_groups.differ(self.agreed("betas"), self.agreed("eps")):
            return None
        both = [self.used("betas"), self.used("eps")]
        held = {(place.file, place.path): place.value for places in both for place in places}
        groups = dict.fromkeys(
            (place.file, self.beside(place, "betas"), self.beside(place, "eps"))
            for places in both
            for place in places
        )
        pairs = (
            param_groups.pair(held.get((file, betas)), held.get((file, eps)))
            for file, betas, eps in groups
        )
        return tuple(dict.fromkeys(pairs) if self.varies("betas") else pairs)

    def headers(self) -> list[StateDict]:
        """`state_dicts`, from which the places of the states may be left out."""
        return self.state_dicts()

    def settings(self, key: str) -> list[Place]:
        """Every place of `key` in the param groups."""
        return [place for each in self.state_dicts() for place in each.group.get(key, ())]

    def group_of(self, place: Place) -> int:
        """The number of the param group that a place of one of its keys is in, by torch's path:
        `…, param_groups, number, key`."""
        return int(place.path[-2])

    def beside(self, place: Place, key: str) -> tuple[Key, ...]:
        """The path of another key in the param group of `place`."""
        return (*place.path[:-1], key)

    def state_dicts(self) -> list[StateDict]:
        """What each optimizer saved, by key; none where the checkpoint holds no optimizer."""
        return []

    @abstractmethod
    def contradictions(self) -> list[str]:
        """What can't be true together in the shards, a sentence each."""

    @abstractmethod
    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """What to write so that the schedule has `values` (recipe keys lr, min_lr, warmup, decay,
        decay_style) from the next step on, and what to warn of.

        Raises UsageError for a schedule that can't be, SurgeryError for one that is kept
        elsewhere, with the trainer's flag to use instead."""

    @abstractmethod
    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Each place of the dynamic loss scaler with the value that it had in a new run."""

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """What to write so that the counter `counter` of `fields.FIELDS` is `value`, with those
        that a load computes from it, and what to warn of; nothing where it is kept nowhere."""
        return [Setting(counter, place, value) for place in self.locate(counter)], []

    def rescale(self, scale: float) -> list[Setting]:
        """What to write so that the dynamic loss scale is `scale` from the next step on: the scale
        and the counters that its next growth is taken from; nothing where there is none."""
        out: list[Setting] = []
        for place in self.locate("loss_scale"):
            out.append(Setting("loss_scale", place, scale))
            for name, start in self.growth.items():
                beside = self.at(place.file, (*place.path[:-1], name))
                out += [Setting("loss_scale", p, start) for p in beside if p.value is not None]
        return out

    @property
    def asked(self) -> bool:
        """Whether a loader of the trainer has been asked, in a test, which values it takes."""
        return True

    # --- tensors ---------------------------------------------------------------------------------

    @abstractmethod
    def parts(self) -> list[Part]:
        """Every stretch of every parameter's weights, masters and moments that the trainer loads.
        Raises SurgeryError where the format does not say whose they are."""

    def known_parts(self) -> Iterable[Part]:
        """Of `parts` what is known, also where that does not do for an edit."""
        try:
            return self.parts()
        except SurgeryError:
            return []


class Disagreement(SurgeryError):
    """Shards of one checkpoint hold different values of a field that must be the same in all."""


def agree(name: str, places: Sequence[Place]) -> None:
    """All files hold the same value under the same path, or Disagreement lists who differs."""
    first: dict[tuple[Key, ...], Place] = {}
    for place in places:
        base = first.setdefault(place.path, place)
        if place.value != base.value:
            raise Disagreement(
                f"shards disagree on {name}: {base.value!r} in {base.file.name}, "
                f"{place.value!r} in {place.file.name}",
                next=(
                    command("verify", why="list every disagreement"),
                    command("doctor", why="which step is sound"),
                ),
            )
