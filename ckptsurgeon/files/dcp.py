"""A folder that torch.distributed.checkpoint wrote: `.metadata` says which bytes hold which value.

Each value, or each chunk of a sharded tensor, is a torch archive of its own inside a `.distcp`
file. An edit never touches those: new values go to a new file, and `.metadata` names them there.
Source of the layout: `torch/distributed/checkpoint/{filesystem,metadata}.py`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import DamagedFile, SurgeryError
from ckptsurgeon.files import dcp_metadata
from ckptsurgeon.files.archives import zeros as torch_blank
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.chunks import Chunks, Item, Place, Table
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.pickles.reader import read_with_globals
from ckptsurgeon.files.pickles.scan import scan
from ckptsurgeon.files.pickles.tree import Object, Tensor, class_of, strides
from ckptsurgeon.files.pickles.values import dumped
from ckptsurgeon.plans.edits import ZEROS, Change, Content, Key, Piece, Span

METADATA = ".metadata"
NEW = re.compile(r"__ckptsurgeon_(\d+)\.distcp")
TOLD_BY = 16
"""Different places of a tensor's chunks that are looked at to tell whether all of it is zeros."""

Blank = tuple[str, tuple[int, ...]]
"""Dtype and size of a tensor of zeros."""


class Whole(Tensor):
    """A tensor that was saved in chunks, by what `.metadata` says: an item is the tree of a chunk,
    read when it is asked for. It has no storage of its own."""

    __slots__ = ("items", "saved")

    def __init__(self, saved: Saved, items: Chunks, dtype: str, size: tuple[int, ...]) -> None:
        super().__init__(dtype, "", prod(size), 0, size, strides(size))
        self.saved, self.items = saved, items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, chunk: int) -> Any:
        return self.saved.chunk(self.items, chunk)

    def __iter__(self) -> Iterator[Any]:
        return (self[chunk] for chunk in range(len(self)))

    def pieces(self) -> Iterator[tuple[Archive, Tensor]]:
        """Each chunk in turn with its archive, which is kept by nobody. Raises DamagedFile for one
        that is not what `.metadata` says."""
        for chunk, item in enumerate(self.items):
            archive = self.saved.opened(item)
            tensor, size = archive.tree(), self.items.shape(chunk)
            if not is_chunk(tensor, self.dtype, size):
                what = f"{self.items.name}: it is not the {self.dtype} {size} of .metadata"
                raise DamagedFile(str(archive.path), item.start, what)
            yield archive, tensor


Sequence.register(Whole)


def is_chunk(tree: Any, dtype: str, size: tuple[int, ...] | None) -> bool:
    """Whether `tree` is a tensor of this dtype and size, as `.metadata` says."""
    return isinstance(tree, Tensor) and (tree.dtype, tree.size) == (dtype, size)


@dataclass
class Saved:
    """The content of one `.metadata`, and the archives it leads to, each opened once."""

    folder: Path
    table: Table

    def __post_init__(self) -> None:
        self._archives: dict[tuple[str, int, int], Archive] = {}
        self._agreeing: dict[str, bool] = {}

    @property
    def path(self) -> Path:
        return self.folder / METADATA

    @property
    def items(self) -> Mapping[str, Chunks]:
        """The chunks of each tensor, and the one item of each other value, by name."""
        return self.table.items

    @property
    def globals(self) -> frozenset[str]:
        """Every `module.name` that a load of `.metadata` imports."""
        return self.table.globals

    @classmethod
    def open(cls, folder: Path, file: Path | None = None) -> Saved:
        """Read `.metadata`, or the `file` that was it once. Raises DamagedFile, or OSError if it
        can't be opened."""
        path = folder / METADATA if file is None else file
        try:
            return cls(folder, dcp_metadata.read(path))
        except FileNotFoundError:
            raise DamagedFile(str(path), 0, "it is missing: the save was not finished") from None

    def archive(self, item: Item) -> Archive:
        """The archive of one item. Raises DamagedFile, and SurgeryError if its bytes were
        transformed."""
        place = item.file, item.start, item.length
        if place not in self._archives:
            self._archives[place] = self.opened(item)
        return self._archives[place]

    def chunk(self, items: Chunks, number: int) -> Any:
        """The tree of a chunk. Raises SurgeryError for an object of a class of its own, as torchao
        has for codes of fewer bits: torch writes it like a tensor of the numbers they stand for."""
        tree = self.archive(items[number]).tree()
        if isinstance(tree, Object):
            raise SurgeryError(
                f"{self.folder / items[number].file}: {items.name} is kept in {class_of(tree)}, "
                "which is neither read nor edited",
                next="work on a step of an optimizer that keeps plain tensors",
            )
        return tree

    def opened(self, item: Item) -> Archive:
        """As `archive`, for one that is read once: a step may have millions."""
        if item.transforms:
            raise SurgeryError(
                f"{self.folder / item.file}: its values are stored {'+'.join(item.transforms)}",
                next="save again without the extension; only plain values can be edited",
            )
        path = self.folder / item.file
        try:
            return Archive.open(path, item.start, item.length)
        except FileNotFoundError:
            raise DamagedFile(str(path), 0, "it is missing, and .metadata names it") from None

    def value(self, name: str) -> Any:
        """The tree of a value; of a tensor a `Whole`, or the list of its chunks where `.metadata`
        does not say what it is. Raises KeyError for no such."""
        items = self.items[name]
        if not items.is_tensor:
            return self.archive(items[0]).tree()
        if items.whole is not None:
            return Whole(self, items, *items.whole)
        return [self.archive(item).tree() for item in items]

    def paths(self, name: str) -> list[tuple[Key, ...]]:
        """The one path to a value or a tensor, whatever the number of its chunks; to each chunk
        where `.metadata` does not say what the tensor is."""
        items = self.items[name]
        if not items.is_tensor or (items.whole is not None and not items.is_number):
            return [(name,)]
        return [(name, chunk) for chunk in range(len(items))]

    def of(self, path: Sequence[Key]) -> Item:
        """The item that `path` leads to: a value's name and what is inside; a tensor's name and the
        number of the chunk. Raises KeyError."""
        items = self.items[str(path[0])]
        chunk = path[1] if items.is_tensor and len(path) > 1 else 0
        if not isinstance(chunk, int) or not 0 <= chunk < len(items):
            raise KeyError(path)
        return items[chunk]

    def is_zero(self, name: str) -> bool:
        """Whether all of a tensor is known to be zeros, by the CRCs of its storages: those of what
        a reset has left, as its chunks share them. False where its chunks lie in many places."""
        items = self.items[name]
        places = list(items.places(TOLD_BY + 1))
        if len(places) > TOLD_BY:
            return False
        if items.is_tensor:
            self.chunk(items, 0)
        archives = (self.archive(item) for item in places)
        return all(archive.is_zero(archive.tree()) for archive in archives)

    def flattened(self) -> list[str]:
        """The names in the order of the state that was saved, which torch's planner writes down for
        a load; none where another planner did not. Read as any pickle, under those limits. The
        order of `items` is another one: that of the writers."""
        data, _ = dcp_metadata.all_bytes(self.path)
        with collector_paused():
            tree, _ = read_with_globals(scan(data, where=str(self.path), dense=True))
        order = tree.state.get("planner_data") if isinstance(tree, Object) else None
        return [str(name) for name in order] if isinstance(order, dict) else []

    def next_file(self) -> str:
        """A name for new values that no earlier surgery has used."""
        used = [int(m[1]) for p in self.folder.iterdir() if (m := NEW.fullmatch(p.name))]
        return f"__ckptsurgeon_{max(used, default=0) + 1}.distcp"

    def render(self, changes: Sequence[Change], base: str, name: str) -> tuple[Content, Content]:
        """The content of the new file `name` with all changed values, and that of `.metadata`.

        `base` is this folder as edits name it. A tensor that becomes zeros as a whole is one blank
        for each shape of its chunks, and none of them is opened but the first and the last, which
        must be what `.metadata` says. Raises as `append.render` does."""
        new = _New(len(self.table.file))
        groups: dict[Item, list[Change]] = {}
        for change in (one for several in changes for one in several.single()):
            (path,) = change.paths()
            items = self.items[str(path[0])]
            if len(path) > 1 or not items.is_tensor:
                groups.setdefault(self.of(path), []).append(change)
            elif change.new == ZEROS and self._agrees(items):
                dtype = items.whole[0] if items.whole is not None else ""
                shapes = items.shapes().items()
                items.choose(new.chosen, {k: new.blank((dtype, shape)) for k, shape in shapes})
            else:
                for chunk, item in enumerate(items):
                    one = replace(change, path=(items.name, chunk))
                    groups.setdefault(item, []).append(one)
        for item, item_changes in groups.items():
            blank = self._blank(item, item_changes)
            new.chosen[item.number] = (
                new.blank(blank)
                if blank is not None
                else new.add(self._parts(item, item_changes, base))
            )
        kept, pieces = self.table.moved(new.chosen, new.places, name)
        start = (Span(f"{base}/{METADATA}", 0, kept),) if kept else ()
        return Content(tuple(new.pieces)), Content((*start, *pieces))

    def _agrees(self, items: Chunks) -> bool:
        """Whether the first and the last chunk of a tensor are what `.metadata` says of them."""
        if items.name not in self._agreeing:
            self._agreeing[items.name] = (
                items.whole is not None
                and torch_blank.is_possible(items.whole[0])
                and all(
                    is_chunk(self.archive(items[chunk]).tree(), items.whole[0], items.shape(chunk))
                    for chunk in {0, len(items) - 1}
                )
            )
        return self._agreeing[items.name]

    def _blank(self, item: Item, changes: Sequence[Change]) -> Blank | None:
        """Dtype and size of a tensor that becomes zeros as a whole."""
        tensor = self.archive(item).tree()
        last = changes[-1]
        zeros = isinstance(tensor, Tensor) and last.new == ZEROS and last.elements is None
        return (
            (tensor.dtype, tensor.size) if zeros and torch_blank.is_possible(tensor.dtype) else None
        )

    def _parts(self, item: Item, changes: Sequence[Change], base: str) -> tuple[Piece, ...]:
        from ckptsurgeon.files.archives import append, rewrite

        archive, file = self.archive(item), f"{base}/{item.file}"
        depth = 1 if item.offset is None else 2
        inside = [replace(c, file=file, path=c.path[depth:]) for c in changes]
        if not isinstance(archive.tree(), Tensor) and not inside[-1].path:
            data = dumped(inside[-1].new, inside[-1].old)
            content = rewrite.render(archive, file, data, {})
        else:
            rendered = append.render(archive, file, inside, strict=True)
            assert isinstance(rendered, Content)
            content = rendered
        return tuple(
            Span(file, part.start + item.start, part.end + item.start)
            if isinstance(part, Span)
            else part
            for part in content.pieces
        )


class _New:
    """The new file of a surgery as it is put together, and which rows lead there: each has the
    number of its place, counted from 1, or 0."""

    def __init__(self, rows: int) -> None:
        self.pieces: list[Piece] = []
        self.places: list[Place] = []
        self.chosen = array("I", bytes(4 * rows))
        self._end = 0
        self._blanks: dict[Blank, int] = {}

    def add(self, parts: Sequence[Piece]) -> int:
        """The number of the place of these bytes."""
        size = Content(tuple(parts)).size
        self.pieces += parts
        self.places.append((self._end, size))
        self._end += size
        return len(self.places)

    def blank(self, blank: Blank) -> int:
        """The same of zeros, which are written once for all."""
        if blank not in self._blanks:
            self._blanks[blank] = self.add((torch_blank.zeros(*blank),))
        return self._blanks[blank]


class Values(dict[str, Any]):
    """Name → value (`Saved.value`), read when it is asked for."""

    def __init__(self, saved: Saved, *known: Mapping[str, Any]) -> None:
        super().__init__(*known)
        self.saved = saved

    def __missing__(self, name: str) -> Any:
        self[name] = self.saved.value(name)
        return self[name]

    def copy(self) -> Values:
        """As `dict.copy`, but values are still read when they are asked for: `patched` lays changes
        over the copy of any tree, and must not read what they do not touch."""
        return Values(self.saved, self)
