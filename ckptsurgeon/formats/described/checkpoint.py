"""One saved step of a described trainer: torch files, and what its page says is in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.capabilities import HasWeights
from ckptsurgeon.formats.described.anew import Anew
from ckptsurgeon.formats.described.description import ANY, COUNTERS, Description, KeyPath
from ckptsurgeon.formats.described.groups_beside import GroupsBeside
from ckptsurgeon.formats.described.savers import Saving
from ckptsurgeon.formats.fields.values import Decay, Located, Place, Setting, State, Weight
from ckptsurgeon.formats.places.safetensors_beside import SafetensorsBeside
from ckptsurgeon.formats.plain import parts
from ckptsurgeon.formats.schedules import saved
from ckptsurgeon.formats.schedules.torch_schedulers import NOT_KNOWN
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.remote import reads


@dataclass
class DescribedCheckpoint(Anew, Saving, SafetensorsBeside, GroupsBeside, HasWeights):
    """The files of one step, and those of a copy of it that a restart loads. `counters` and
    `savers` are (file, key path)."""

    loose: ClassVar[bool] = True

    description: Description | None = None
    counters: Mapping[str, tuple[Located, ...]] | None = None
    savers: tuple[Located, ...] = ()
    nowhere: tuple[str, ...] = ()
    """Where the page has a scheduler and the file has none."""

    def find(self, field: str) -> Sequence[Place]:
        """What the page names, and what a torch optimizer and scheduler keep. What the trainer
        makes itself wins in no group where it does."""
        if field in COUNTERS:
            return self.below((self.counters or {}).get(field, ()))
        places = super().find(field)
        if not self.is_anew(field):
            return places
        return [
            place._replace(wins=place.wins and not self.makes(field, place)) for place in places
        ]

    def iteration(self) -> int:
        """What the page calls so, else the step."""
        places = self.locate("iteration")
        return int(places[0].value) if places else self.step

    @property
    def asked(self) -> bool:
        """By its page."""
        return self.description is None or bool(self.description.witness)

    @property
    def numbered(self) -> bool:
        """Of several optimizers each update counts as a step; names may count epochs."""
        return self.several() <= 1 and not self.outrun()

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """By the saved scheduler, where it is where the page says."""
        self._refuse_nowhere()
        return super().reschedule(values)

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """As a new rate."""
        self._refuse_nowhere()
        return super().cooldown(decay)

    def _refuse_nowhere(self) -> None:
        """Raise SurgeryError where the scheduler may be somewhere else, and have the last word."""
        if self.nowhere:
            raise SurgeryError(
                f"{self.nowhere[0]} leads nowhere, and there the page of {self.family} has the "
                "scheduler, which makes the rate from the second update on",
                next=command(
                    "check-format", "FORMAT", why="after the page leads to it, or names none"
                ),
            )

    def read_state(self) -> State:
        """With the tokens, where the page names them."""
        tokens = self.clear("tokens")
        return replace(super().read_state(), tokens=int(tokens[0]) if tokens else None)

    def notes(self) -> Iterator[str]:
        """Whether a loader was asked, and what the page says of a bucket."""
        yield from super().notes()
        if self.saved_schedule() is not None and self.in_words() == NOT_KNOWN:
            yield saved.FOREIGN
        yield from self.on_anew()
        if not self.optimizers:
            yield (
                f"the description of {self.family} names no optimizer: what the checkpoint keeps "
                "of it is neither shown nor edited"
            )
        if self.description is not None:
            yield from self.description.doubts()
            if self.description.in_a_bucket and reads.current() is not None:
                yield self.description.in_a_bucket

    def weights(self) -> Iterator[Weight]:
        """Each tensor of one file whose rows lie one after the other. Raises SurgeryError where the
        page names no weights, and where several files of the step have some."""
        if not self.weights_at:
            raise HasWeights.lacking(self)
        first = self.weights_at[0][0]
        files = {file for file, _ in self.weights_at} - self.repeated.keys()
        if len(files) > 1:
            raise SurgeryError(
                f"{self.path.name} has weights in {count(len(files), 'file')}, and no page says "
                "which part of a tensor is in which",
                next="use the trainer's own conversion tool",
            )
        for item in self.weights_at:
            if item[0] == first:
                yield from parts.consolidated(self, parts.in_tree(self, item))


def expanded(tree: Any, path: KeyPath) -> Iterator[KeyPath]:
    """The paths that `path` stands for in `tree`, each `*` filled in; none if it leads nowhere."""
    for depth, key in enumerate(path):
        if key == ANY:
            if not isinstance(tree, (list, tuple, dict)):
                return
            for each in range(len(tree)) if isinstance(tree, (list, tuple)) else tree:
                inner = expanded(tree[each], path[depth + 1 :])
                yield from ((*path[:depth], each, *rest) for rest in inner)
            return
        keys = (key, int(key)) if isinstance(key, str) and key.isdecimal() else (key,)
        here = next((each for each in keys if _has(tree, each)), None)
        if here is None:
            return
        path = (*path[:depth], here, *path[depth + 1 :])
        tree = get(tree, (here,))
    yield path


def _has(tree: Any, key: Key) -> bool:
    try:
        get(tree, (key,))
    except KeyError:
        return False
    return True
