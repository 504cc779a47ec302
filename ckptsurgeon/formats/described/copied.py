"""A step that is saved more than once, in folders: what is done to one is done to each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import AnyChange, Append, Change, Content, Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.formats import head_counts
from ckptsurgeon.formats.columns import Column
from ckptsurgeon.formats.heads import Attention
from ckptsurgeon.formats.protocol import Checkpoint
from ckptsurgeon.formats.step_folders import files_below
from ckptsurgeon.formats.values import (
    Blob,
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


@dataclass
class Copied:
    """`each` is a whole checkpoint in a folder of its own: a restart may load any of them. The
    first one speaks for the step."""

    each: tuple[Checkpoint, ...]

    def __post_init__(self) -> None:
        self.path, self.step = self.each[0].path, self.each[0].step
        self.trees: dict[Path, Any] = {}
        self.archives: dict[Path, Archive] = {}
        for one in self.each:
            self.trees |= one.trees
            self.archives |= one.archives

    def _of(self, file: Path) -> Checkpoint:
        return next(one for one in self.each if one.path in file.parents)

    @property
    def numbered(self) -> bool:
        """As the first one."""
        return self.each[0].numbered

    def contradictions(self) -> list[str]:
        """Those of each, and a promise that differs."""
        out = [sentence for one in self.each for sentence in one.contradictions()]
        for one in self.each[1:]:
            try:
                alike = one.state().promise == self.state().promise
            except SurgeryError as error:
                out.append(error.what)
                continue
            if not alike:
                out.append(f"{one.path.name} and {self.path.name} lead to different next steps")
        return out

    def state(self) -> State:
        """That of the first one."""
        return self.each[0].state()

    # --- places: of every one --------------------------------------------------------------------

    def locate(self, field: str) -> Sequence[Place]:
        """In every one."""
        return [place for one in self.each for place in one.locate(field)]

    def settings(self, key: str) -> list[Place]:
        """In every one."""
        return [place for one in self.each for place in one.settings(key)]

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """In every one."""
        return [pair for one in self.each for pair in one.of_parameters(key)]

    def state_dicts(self) -> list[StateDict]:
        """Of every one."""
        return [saved for one in self.each for saved in one.state_dicts()]

    def fragments(self, name: str) -> list[Fragment]:
        """Of every one."""
        return [fragment for one in self.each for fragment in one.fragments(name)]

    def parts(self) -> list[Part]:
        """Of the first one: the others repeat it."""
        return self.each[0].parts()

    def like(self, other: Checkpoint) -> Checkpoint:
        """Itself: `parts` and `copies` tell the first one from the others."""
        return self

    def copies(self) -> Mapping[Path, Path]:
        """Each file of the others that is in the first one too."""
        return {
            file: self.path / file.relative_to(one.path)
            for one in self.each[1:]
            for file in files_below(one.path)
        }

    def attention(self) -> tuple[list[Attention], list[str]]:
        """Refused: no page says how many heads a model has."""
        raise head_counts.unread(self.path.name)

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Of every one."""
        return [pair for one in self.each for pair in one.scaler_start()]

    def rescale(self, scale: float) -> list[Setting]:
        """In every one."""
        return [setting for one in self.each for setting in one.rescale(scale)]

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """In every one; what to warn of, once."""
        return _together([one.reschedule(values) for one in self.each])

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """In every one; what to warn of, once."""
        return _together([one.cooldown(decay) for one in self.each])

    def rebatch(
        self, size: int | None, ramp: Sequence[int] | None, own_config: bool
    ) -> tuple[list[Setting], list[str]]:
        """In every one; what to warn of, once."""
        return _together([one.rebatch(size, ramp, own_config) for one in self.each])

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """In every one; what to warn of, once."""
        return _together([one.recount(counter, value) for one in self.each])

    def forget(
        self, gone: Collection[Path], resumed: Sequence[Path]
    ) -> tuple[list[Setting], list[str]]:
        """In every one; what to warn of, once."""
        return _together([one.forget(gone, resumed) for one in self.each])

    def conversion(self, to: str) -> Conversion:
        """Of every one; config and launch are those of the first."""
        made = [one.conversion(to) for one in self.each]
        settings = tuple(setting for item in made for setting in item.settings)
        names = {file: name for item in made for file, name in item.names.items()}
        return made[0]._replace(settings=settings, names=names)

    def strips(self) -> Iterator[Strip]:
        """Of every one."""
        return (strip for one in self.each for strip in one.strips())

    # --- places: of the one that they are in -----------------------------------------------------

    def group_of(self, place: Place) -> int:
        """By the one that has the place."""
        return self._of(place.file).group_of(place)

    def beside(self, place: Place, key: str) -> tuple[Key, ...]:
        """By the one that has the place."""
        return self._of(place.file).beside(place, key)

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """By the one that has the place."""
        return self._of(place.file).in_group(key, place, value)

    def value(self, file: Path, path: tuple[Key, ...]) -> Any:
        """By the one that has the file."""
        return self._of(file).value(file, path)

    def are_zero(self, column: Column) -> list[bool]:
        """By the one that has the places."""
        return self._of(column.file).are_zero(column)

    def is_zero(self, place: Place, elements: tuple[int, int] | None = None) -> bool:
        """By the one that has the place."""
        return self._of(place.file).is_zero(place, elements)

    def pieces(self, place: Place) -> list[Place]:
        """By the one that has the place."""
        return self._of(place.file).pieces(place)

    def span(self, place: Place, start: int, end: int) -> tuple[Path, int, int]:
        """By the one that has the place."""
        return self._of(place.file).span(place, start, end)

    def holder(self, place: Place) -> Archive:
        """By the one that has the place."""
        return self._of(place.file).holder(place)

    # --- of the first one ------------------------------------------------------------------------

    def replicas(self) -> list[Replica]:
        """Of the first one."""
        return self.each[0].replicas()

    def weights(self) -> Iterator[Weight]:
        """Of the first one."""
        return self.each[0].weights()

    # --- files -----------------------------------------------------------------------------------

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """Each one its own."""
        out: dict[str, Append | Content] = {}
        for one in self.each:
            mine = {file: own for file, own in changes.items() if self._of(root / file) is one}
            out |= one.render(mine, root)
        return out

    def compact(self, root: Path) -> list[tuple[str, Content, int]]:
        """Of every one."""
        return [item for one in self.each for item in one.compact(root)]

    def blobs(self) -> Iterator[Blob]:
        """Of every one."""
        return (blob for one in self.each for blob in one.blobs())

    def digests(self) -> Mapping[Path, str]:
        """Of every one."""
        return {path: digest for one in self.each for path, digest in one.digests().items()}

    def globals(self) -> Mapping[str, frozenset[str]]:
        """Of every one."""
        return {file: names for one in self.each for file, names in one.globals().items()}

    def rounded(self, changes: Iterable[AnyChange], root: Path) -> list[AnyChange]:
        """By that one whose file it is."""
        for one in self.each:
            changes = one.rounded(changes, root)
        return list(changes)

    def after(self, changes: Sequence[AnyChange], root: Path) -> Copied:
        """Every one with its own."""
        return Copied(tuple(one.after(changes, root) for one in self.each))


def _together(
    parts: Sequence[tuple[list[Setting], list[str]]],
) -> tuple[list[Setting], list[str]]:
    settings = [setting for part, _ in parts for setting in part]
    return settings, list(dict.fromkeys(note for _, notes in parts for note in notes))
