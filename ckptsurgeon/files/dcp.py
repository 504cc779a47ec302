"""A folder that torch.distributed.checkpoint wrote: `.metadata` says which bytes hold which value.

Each value, or each chunk of a sharded tensor, is a torch archive of its own inside a `.distcp`
file. An edit never touches those: new values go to a new file, and `.metadata` names them there.
Source of the layout: `torch/distributed/checkpoint/{filesystem,metadata}.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ckptsurgeon.edits import ZEROS, Change, Content, Key, Piece, Span
from ckptsurgeon.errors import DamagedFile, SurgeryError
from ckptsurgeon.files.archives import append, rewrite
from ckptsurgeon.files.archives import zeros as torch_blank
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.pickles import splice
from ckptsurgeon.files.pickles.scan import MAX_BYTES, Scan, scan
from ckptsurgeon.files.pickles.splice import Nth
from ckptsurgeon.files.pickles.tree import Object, Tensor, read_with_globals
from ckptsurgeon.files.pickles.values import dumped

METADATA = ".metadata"
NEW = re.compile(r"__ckptsurgeon_(\d+)\.distcp")
FIELDS = ("relative_path", "offset", "length")


class Item(NamedTuple):
    """Where one value lies: `length` bytes from `start` on in `file`. `offset` is that of a chunk
    in its tensor, None for a value that is not a tensor; `number` counts the entries of
    `storage_data`; `transforms` name what its bytes went through (compression)."""

    number: int
    file: str
    start: int
    length: int
    offset: tuple[int, ...] | None
    transforms: tuple[str, ...]


@dataclass
class Saved:
    """The content of one `.metadata`, and the archives it leads to, each opened once."""

    folder: Path
    size: int
    scanned: Scan
    items: dict[str, list[Item]]
    globals: frozenset[str]

    def __post_init__(self) -> None:
        self._archives: dict[Item, Archive] = {}

    @property
    def path(self) -> Path:
        return self.folder / METADATA

    @classmethod
    def open(cls, folder: Path, file: Path | None = None) -> Saved:
        """Read `.metadata`, or the `file` that was it once. Raises DamagedFile, or OSError if it
        can't be opened."""
        path = folder / METADATA if file is None else file
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DamagedFile(str(path), 0, "it is missing: the save was not finished") from None
        if size > MAX_BYTES:
            raise DamagedFile(str(path), 0, f"it has {size} bytes, more than {MAX_BYTES}")
        with collector_paused():
            scanned = scan(path.read_bytes(), where=str(path), dense=True)
            tree, globals = read_with_globals(scanned)
            try:
                items = _items(tree.state["storage_data"])
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                what = f"this is not a Metadata of torch ({type(error).__name__}: {error})"
                raise DamagedFile(str(path), 0, what[:200]) from None
        for item in (item for chunks in items.values() for item in chunks):
            parts = item.file.split("/")
            if item.file.startswith("/") or ".." in parts or "\0" in item.file:
                raise DamagedFile(str(path), 0, f"the file name {item.file!r} leaves the folder")
        return cls(folder, size, scanned, items, globals)

    def archive(self, item: Item) -> Archive:
        """The archive of one item. Raises DamagedFile, and SurgeryError if its bytes were
        transformed."""
        if item not in self._archives:
            if item.transforms:
                raise SurgeryError(
                    f"{self.folder / item.file}: its values are stored {'+'.join(item.transforms)}",
                    next="save again without the extension; only plain values can be edited",
                )
            path = self.folder / item.file
            self._archives[item] = Archive.open(path, item.start, item.length)
        return self._archives[item]

    def value(self, name: str) -> Any:
        """The tree of a value, or the list of a tensor's chunks. Raises KeyError for no such."""
        chunks = self.items[name]
        if chunks[0].offset is None:
            return self.archive(chunks[0]).tree()
        return [self.archive(item).tree() for item in chunks]

    def of(self, path: Sequence[Key]) -> Item:
        """The item that `path` leads to: a value's name and what is inside; a tensor's name and the
        number of the chunk. Raises KeyError."""
        chunks = self.items[str(path[0])]
        chunk = path[1] if chunks[0].offset is not None and len(path) > 1 else 0
        if not isinstance(chunk, int) or not 0 <= chunk < len(chunks):
            raise KeyError(path)
        return chunks[chunk]

    def next_file(self) -> str:
        """A name for new values that no earlier surgery has used."""
        used = [int(m[1]) for p in self.folder.iterdir() if (m := NEW.fullmatch(p.name))]
        return f"__ckptsurgeon_{max(used, default=0) + 1}.distcp"

    def render(self, changes: Sequence[Change], base: str, name: str) -> tuple[Content, Content]:
        """The content of the new file `name` with all changed values, and that of `.metadata`.

        `base` is this folder as edits name it. Raises as `append.render` does."""
        groups: dict[Item, list[Change]] = {}
        for change in changes:
            groups.setdefault(self.of(change.path), []).append(change)
        pieces: list[Piece] = []
        places: dict[Any, tuple[int, int]] = {}  # of what is written once for many items too
        edits: dict[tuple[Key | Nth, ...], Any] = {}
        end = 0
        for item, item_changes in groups.items():
            blank = self._blank(item, item_changes)
            place = places.get(blank) if blank is not None else None
            if place is None:
                parts = (
                    self._parts(item, item_changes, base)
                    if blank is None
                    else (torch_blank.zeros(*blank),)
                )
                length = Content(tuple(parts)).size
                pieces += parts
                place = end, length
                end += length
                if blank is not None:
                    places[blank] = place
            for field, new in zip(FIELDS, (name, *place), strict=True):
                edits["storage_data", Nth(item.number), field] = new
        with collector_paused():
            data = splice.splice(self.scanned.data, edits, scanned=self.scanned)
        return Content(tuple(pieces)), Content((data,))

    def _blank(self, item: Item, changes: Sequence[Change]) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and size of a tensor that becomes zeros as a whole."""
        tensor = self.archive(item).tree()
        zeros = isinstance(tensor, Tensor) and changes[-1].new == ZEROS
        return (
            (tensor.dtype, tensor.size) if zeros and torch_blank.is_possible(tensor.dtype) else None
        )

    def _parts(self, item: Item, changes: Sequence[Change], base: str) -> tuple[Piece, ...]:
        archive, file = self.archive(item), f"{base}/{item.file}"
        depth = 1 if item.offset is None else 2
        inside = [Change(file, c.field, c.old, c.new, c.path[depth:]) for c in changes]
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


def _items(storage_data: Mapping[Any, Any]) -> dict[str, list[Item]]:
    """By name, the chunks in ascending order of where they lie in the tensor."""
    out: dict[str, list[Item]] = {}
    for number, (index, info) in enumerate(storage_data.items()):
        key, value = _attributes(index), _attributes(info)
        file, start, length = (value[field] for field in FIELDS)
        if not (type(file) is str and type(start) is type(length) is int and start >= 0 < length):
            raise ValueError(f"{key['fqn']!r} lies at {start!r} in {file!r}")
        offset = key.get("offset")
        item = Item(
            number=number,
            file=file,
            start=start,
            length=length,
            offset=None if offset is None else tuple(offset),
            transforms=tuple(value.get("transform_descriptors") or ()),
        )
        out.setdefault(key["fqn"], []).append(item)
    for chunks in out.values():
        chunks.sort(key=lambda item: item.offset or ())
    return out


def _attributes(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Object) or not isinstance(value.state, dict):
        raise TypeError(f"{value!r:.80} has no attributes")
    return value.state
