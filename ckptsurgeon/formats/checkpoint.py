"""What the checkpoints of all families have in common: fields, their meaning, and their changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ckptsurgeon.edits import Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats import head_counts, param_groups, strips
from ckptsurgeon.formats.columns import Places
from ckptsurgeon.formats.fields import FIELDS
from ckptsurgeon.formats.heads import Attention
from ckptsurgeon.formats.protocol import Checkpoint, Disagreement
from ckptsurgeon.formats.sane import understood
from ckptsurgeon.formats.trees import Trees
from ckptsurgeon.formats.values import (
    Conversion,
    Decay,
    Fragment,
    Part,
    Place,
    Replica,
    Setting,
    State,
    StateDict,
    Strip,
    Weight,
)
from ckptsurgeon.promise import Promise


@dataclass
class BaseCheckpoint(Trees, ABC):
    """One saved step with the tree of each torch file in it. A family says by `find` where a field
    is and by `read_state` what it means; it overrides what it can do beyond that."""

    growth: ClassVar[Mapping[str, int]] = {}
    """Counters beside a loss scale that its next growth is taken from → their start."""

    def __post_init__(self) -> None:
        self._places: dict[str, Sequence[Place]] = {}
        self._state: State | None = None

    # --- fields ----------------------------------------------------------------------------------

    @abstractmethod
    def find(self, field: str) -> Sequence[Place]:
        """Every place of `field`, as the files have it; an empty list when it is kept nowhere.
        What it stumbles over is an error of the file."""

    def locate(self, field: str) -> Sequence[Place]:
        """What `find` says, asked once, and only values that the field can have."""
        assert field in FIELDS, f"no field is called {field}"
        if field not in self._places:
            with understood(self.path):
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

    def agreed(self, field: str) -> list[Any]:
        """The values of `field` that decide, as the first file has them. Raises Disagreement when
        another file has others."""
        places = self.deciding(field)
        agree(field, places)
        return [place.value for place in places if place.file == places[0].file]

    # --- meaning ---------------------------------------------------------------------------------

    @abstractmethod
    def read_state(self) -> State:
        """The state, from what `agreed` and `promise` say."""

    def state(self) -> State:
        """The promise of this checkpoint. Raises Disagreement with the files that differ."""
        if self._state is None:
            with understood(self.path):
                state = self.read_state()
            self._state = replace(state, promise=state.promise.told(state.notes))
        return self._state

    def rates(self) -> list[float]:
        """The lr of each param group, without those that are None: their optimizer computes one."""
        return [float(rate) for rate in self.agreed("lr") if rate is not None]

    def promise(self, step: int, lr: float | None) -> Promise:
        """What the step after `step` will use: `lr`, and of every other field what is agreed."""
        headers = self.headers()
        betas, eps = self.agreed("betas"), self.agreed("eps")
        decays, adam = self.agreed("weight_decay"), self.agreed("adam_step")
        scale, clip = self.agreed("loss_scale"), self.agreed("clip_grad")
        samples, seed, skip = (self.agreed(n) for n in ("consumed_samples", "seed", "skip"))
        epoch, batches = self.agreed("data_epoch"), self.agreed("data_batches")
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
            optimizer=param_groups.named(headers) or None,
            groups=param_groups.differing(betas, eps),
            settings=param_groups.numbers(headers) or None,
            data_epoch=int(epoch[0]) if epoch else None,
            data_batches=int(batches[0]) if batches else None,
        )

    def headers(self) -> list[StateDict]:
        """`state_dicts`, from which the places of the states may be left out."""
        return self.state_dicts()

    def settings(self, key: str) -> list[Place]:
        """In the groups of every optimizer."""
        return [place for each in self.state_dicts() for place in each.group.get(key, ())]

    def group_of(self, place: Place) -> int:
        """As torch's `state_dict` has it: `…, param_groups, number, key`."""
        return int(place.path[-2])

    def beside(self, place: Place, key: str) -> tuple[Key, ...]:
        """Beside it."""
        return (*place.path[:-1], key)

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """The value: most trainers give each group the same, or take it from the groups."""
        return value

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """Refused: a format that knows the names in its param groups overrides it."""
        raise SurgeryError(
            f"{self.path.name} does not say which parameters its param groups hold",
            next="ckptsurgeon show    what it keeps; without --params, all groups are set",
        )

    def state_dicts(self) -> list[StateDict]:
        """None: a family that saves optimizers overrides it."""
        return []

    @abstractmethod
    def contradictions(self) -> list[str]:
        """What can't be true together in the shards, a sentence each."""

    @abstractmethod
    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """See `protocol.Checkpoint.reschedule`."""

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """Refused: a family that knows its schedulers overrides it."""
        raise SurgeryError(
            f"what makes the rate of {self.path.name} decay is not known here",
            next="set the schedule where the trainer makes it",
        )

    def conversion(self, to: str) -> Conversion:
        """Refused: a family whose loaders of each precision are known overrides it."""
        raise SurgeryError(
            f"what a trainer in {to} loads of {self.path.name} is not known here",
            next=f"set {to} where the trainer is started, and compare its first losses",
        )

    @abstractmethod
    def scaler_start(self) -> list[tuple[Place, Any]]:
        """See `protocol.Checkpoint.scaler_start`."""

    def rebatch(
        self, size: int | None, ramp: Sequence[int] | None, own_config: bool
    ) -> tuple[list[Setting], list[str]]:
        """Kept nowhere: a family that knows its batch size overrides it."""
        return [], []

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """The number itself in every place."""
        return [Setting(counter, place, value) for place in self.locate(counter)], []

    def forget(
        self, gone: Collection[Path], resumed: Sequence[Path]
    ) -> tuple[list[Setting], list[str]]:
        """Nothing: most trainers look at what is in the run when they clean up."""
        return [], []

    def rescale(self, scale: float) -> list[Setting]:
        """The scale in every place, and the counters of `growth` beside each at their start."""
        out: list[Setting] = []
        for place in self.locate("loss_scale"):
            out.append(Setting("loss_scale", place, scale))
            for name, start in self.growth.items():
                beside = self.at(place.file, (*place.path[:-1], name))
                out += [Setting("loss_scale", p, start) for p in beside if p.value is not None]
        return out

    @property
    def numbered(self) -> bool:
        """A trainer counts its updates, and saves by that count."""
        return True

    # --- tensors ---------------------------------------------------------------------------------

    def fragments(self, name: str) -> list[Fragment]:
        """Refused: a format that keeps moments by parameter name overrides it."""
        raise SurgeryError(
            f"{self.path.name} does not say which parameter an element of {name} belongs to",
            next="ckptsurgeon reset moments    of all parameters",
        )

    def replicas(self) -> list[Replica]:
        """Refused: a format that knows its tensor-parallel ranks overrides it."""
        raise SurgeryError(
            f"which parameters of {self.path.name} are whole on every rank is not known here",
            next="ckptsurgeon verify    what can be checked here",
        )

    def pieces(self, place: Place) -> list[Place]:
        """Itself: a tensor is saved as one."""
        return [place]

    def parts(self) -> list[Part]:
        """Refused: a format that knows whose each tensor is overrides it."""
        raise SurgeryError(
            f"{self.path.name} does not say which of its tensors are one parameter's weights, "
            "master and moments",
            next="reset and graft work on the moments of all parameters",
        )

    def like(self, other: Checkpoint) -> Checkpoint:
        """Itself: most trainers save a step in one form."""
        return self

    def copies(self) -> Mapping[Path, Path]:
        """None: a family that saves a step twice overrides it."""
        return {}

    def attention(self) -> tuple[list[Attention], list[str]]:
        """Refused: a format that knows how many heads the model has overrides it."""
        raise head_counts.unread(self.path.name)

    def weights(self) -> Iterator[Weight]:
        """Refused: a format that knows how its weights are cut overrides it."""
        raise SurgeryError(
            f"how the weights of {self.path.name} are cut into shards is not known here",
            next="use the trainer's own conversion tool",
        )

    def strips(self) -> Iterator[Strip]:
        """Of `parts`, and of the states of which these name nothing."""
        return strips.strips(self)


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
                    "ckptsurgeon verify    list every disagreement",
                    "ckptsurgeon doctor    which step is sound",
                ),
            )
