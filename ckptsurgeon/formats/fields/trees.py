"""The torch files of a saved step as trees: their values, new bytes, and changes laid over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

from ckptsurgeon.errors import Impossible, NotUnderstood, SurgeryError
from ckptsurgeon.files.archives.archive import PICKLE, Archive
from ckptsurgeon.files.archives.storage_edit import contiguous
from ckptsurgeon.files.dtypes import FLOATS, ITEM_BYTES, NUMBERS, element, number
from ckptsurgeon.files.pickles.tree import Tensor, get, get_each
from ckptsurgeon.formats.fields.columns import Column, Places
from ckptsurgeon.formats.fields.patched import New, patched, plant
from ckptsurgeon.formats.fields.shard_files import opened, parsing
from ckptsurgeon.formats.fields.understood import impossible, is_bounded, problem
from ckptsurgeon.formats.fields.values import Located, Place
from ckptsurgeon.plans.edits import (
    ZEROS,
    AnyChange,
    Append,
    Change,
    Computed,
    Content,
    Elements,
    Fill,
    Key,
    NewName,
    NewStep,
)
from ckptsurgeon.workers import side_by_side

Self = TypeVar("Self", bound="Trees")


@dataclass
class Trees:
    """The tree of each torch file of a step, and the archive that it was read from. What a family
    keeps in other files, it overrides."""

    path: Path
    step: int
    trees: dict[Path, Any]
    archives: dict[Path, Archive]

    def at(self, file: Path, path: tuple[Key, ...], wins: bool = True) -> list[Place]:
        """The place `path` of `file` with its plain value, or nothing if it is not there."""
        try:
            value = get(self.trees[file], path)
        except KeyError:
            return []
        return [Place(file, path, self.plain(file, value), wins)]

    def below(self, located: Iterable[Located], *keys: Key) -> list[Place]:
        """The place `keys` under each of `located`, as far as it is there."""
        return [place for file, path in located for place in self.at(file, (*path, *keys))]

    def value(self, file: Path, path: tuple[Key, ...]) -> Any:
        """The value under `path` in `file`; None when it is not there."""
        places = self.at(file, path)
        return places[0].value if places else None

    def has_each(self, file: Path, path: tuple[Key, ...]) -> bool:
        """Whether the list under `path` has tensors in it: an edit is of one of them."""
        value = get(self.trees[file], path)
        return isinstance(value, (list, tuple)) and Tensor in map(type, value)

    def plain(self, file: Path, value: Any) -> Any:
        """`value`, with the number in place of a tensor of one element: of it, or of a list."""
        kind = type(value)
        if kind is Tensor:
            return self._number(file, value)
        if kind in (list, tuple) and Tensor in map(type, value):
            return kind(self._number(file, item) for item in value)
        return value

    def numbers(self, file: Path, value: Any) -> Any:
        """The same at any depth: schedulers of an optimizer whose lr is a tensor keep tensors."""
        return self._deep(file, value) if is_bounded(value) else value

    def _deep(self, file: Path, value: Any) -> Any:
        kind = type(value)
        if kind is dict:
            return {key: self._deep(file, item) for key, item in value.items()}
        if kind in (list, tuple):
            return kind(self._deep(file, item) for item in value)
        return self._number(file, value)

    def _number(self, file: Path, value: Any) -> Any:
        """A tensor of one element whose bytes say a number as that, all else as it is."""
        if type(value) is not Tensor or value.numel != 1 or value.dtype not in NUMBERS:
            return value
        return self.archives[file].value(value)

    def read(self, paths: Iterable[Path]) -> None:
        """Read the trees of further shards, which only some operations need."""
        for path, archive in opened(p for p in paths if p not in self.archives).items():
            self.archives[path] = archive
            self.trees[path] = archive.tree()

    def holder(self, place: Place) -> Archive:
        """The archive that has the elements of the tensor at `place`: that of its file."""
        return self.archives[place.file]

    def is_zero(self, place: Place, elements: tuple[int, int] | None = None) -> bool:
        """Whether the tensor in `place` is known to be all zeros without reading its bytes, by the
        CRC of its storage; of `elements` [start, end), whether they are zeros by their bytes."""
        archive = self.archives[place.file]
        byte = place.zero.byte if isinstance(place.zero, Fill) else 0
        return isinstance(place.value, Tensor) and archive.is_zero(place.value, elements, byte)

    def span(self, place: Place, start: int, end: int) -> tuple[Path, int, int]:
        """Where the elements [start, end) of the tensor at `place` are: file, first byte, end.
        Raises SurgeryError for a tensor whose elements don't lie in the order of its shape."""
        archive, tensor = self.holder(place), place.value
        if not contiguous(tensor) or archive.byte_order() != "<":
            raise SurgeryError(
                f"{archive.where}: a tensor's elements do not lie little-endian in the order of "
                "its shape",
                next="save the checkpoint again with contiguous tensors",
            )
        archive.storage(tensor)
        item = ITEM_BYTES[tensor.dtype]
        base = archive.start + archive.payload(f"data/{tensor.storage}") + tensor.offset * item
        return archive.path, base + start * item, base + end * item

    def check(
        self,
        name: str,
        places: Sequence[Place],
        problem: Callable[[str, Any], str] = problem,
    ) -> None:
        """Raise NotUnderstood for a value of which `problem` finds that `name` can't have it."""
        for column in Places.of(places).columns:
            if any(problem(name, each) for each in _apart(column)):
                for place in column:
                    if reason := problem(name, place.value):
                        raise self.refused(name, place, reason)

    def refused(self, name: str, place: Place, reason: str) -> SurgeryError:
        """The error of a place whose value is not one of `name`."""
        key, _, rest = reason.removeprefix(name).partition(" is ")
        where = ".".join(map(str, place.path))
        kind = Impossible if impossible(place.value) else NotUnderstood
        return kind(f"{name} is not understood: {place.file.name}: {where}{key} is {rest}")

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """The new bytes of every file of the run at `root` that `changes` (file → its own) lead to;
        a file that is not there yet is a new one. Together they are one state of the checkpoint."""
        from ckptsurgeon.files.archives import append

        def render(file: str) -> Append | Content:
            archive = self.archives[root / file]
            with parsing(archive.record(PICKLE).size):
                return append.render(archive, file, changes[file])

        return dict(zip(changes, side_by_side(render, changes), strict=True))

    def globals(self) -> dict[str, frozenset[str]]:
        """By shard, every `module.name` that its trainer would import to load it."""
        return {f"{p.parent.name}/{p.name}": self.archives[p].globals() for p in self.archives}

    def after(self: Self, changes: Sequence[AnyChange], root: Path) -> Self:
        """This step as it will be once `changes` are on disk; nothing is written."""
        patches: dict[Path, dict[Key, Any]] = {}
        roots: dict[Path, Any] = {}
        names: dict[Path, Path] = {}
        changed = {change.file for change in changes}
        files = {name: root / name for name in changed if root / name in self.trees}
        for change in changes:
            if isinstance(change, Change) and (file := files.get(change.file)) is not None:
                if isinstance(change.new, (Fill, Elements, Computed)):
                    continue
                if isinstance(change, NewName):
                    if not isinstance(change, NewStep):
                        names[file] = file.with_name(str(change.new))
                    continue
                new, paths = change.new, iter((change.path,))
                if new == ZEROS:  # a tensor stays what it is: its elements are in no tree
                    saved = get_each(self.trees[file], change.path)
                    number = [not isinstance(value, Tensor) for value in saved]
                    new, paths = 0, compress(change.paths(), number) if any(number) else iter(())
                for path in paths:
                    if path:
                        plant(patches.setdefault(file, {}), path, New(new))
                    else:  # the file is one value
                        roots[file] = new
        trees = {
            file: patched(tree, patches[file]) if file in patches else tree
            for file, tree in self.trees.items()
        }
        trees |= roots
        step = next((c.step for c in changes if isinstance(c, NewStep)), self.step)
        if not names:
            return replace(self, trees=trees, step=step)
        return replace(
            self,
            step=step,
            trees={names.get(file, file): tree for file, tree in trees.items()},
            archives={names.get(file, file): archive for file, archive in self.archives.items()},
        )


def are_zero(saved: Trees, column: Column) -> list[bool]:
    """Of each place what `is_zero` says; the archive of many is asked once."""
    archive, tensors = saved.archives.get(column.file), {*map(type, column.values)} == {Tensor}
    if archive is not None and tensors and column.zero == ZEROS:
        return archive.are_zeros(column.values)
    return [saved.is_zero(place) for place in column]


def compacted(saved: Trees, root: Path) -> list[tuple[str, Content, int]]:
    """For each shard with dead bytes: its name from `root`, its content without them, and how many
    they are."""
    from ckptsurgeon.files.archives import compact

    out = []
    for path, archive in saved.archives.items():
        file = path.relative_to(root).as_posix()
        content = compact.compact(archive, file)
        if content is not None:
            out.append((file, content, archive.size - content.size))
    return out


def rounded(saved: Trees, changes: Iterable[AnyChange], root: Path) -> list[AnyChange]:
    """The same with each number as the tensor holds it that it goes into: a rate for which
    torch.compile made a float32."""
    return [_rounded(change, saved.trees.get(root / change.file)) for change in changes]


def _rounded(change: AnyChange, tree: Any) -> AnyChange:
    if not isinstance(change, Change) or not isinstance(change.new, float) or tree is None:
        return change
    try:
        leaf = get(tree, next(change.paths()))
    except KeyError:
        return change
    if not isinstance(leaf, Tensor) or leaf.dtype not in FLOATS:
        return change
    try:
        return replace(change, new=number(element(change.new, leaf.dtype, "<"), leaf.dtype, "<"))
    except ValueError:  # too large for it, which the edit refuses by its name
        return change


def _apart(column: Column) -> Iterable[Any]:
    """Its values, each once: thousands hold a tensor, or the same number."""
    kinds = {*map(type, column.values)}
    if kinds == {Tensor}:
        return column.values[:1]
    if kinds <= {int, float}:
        return {(type(value), value): value for value in column.values}.values()
    return column.values
