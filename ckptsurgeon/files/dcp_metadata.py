"""Reads the `.metadata` of torch.distributed.checkpoint: which bytes hold which chunk.

The native module reads what torch writes in one pass, and no byte of it is kept; any other pickle,
and every pickle where it was not built, is read as all others are, under their limits.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from ckptsurgeon import whole_file
from ckptsurgeon.errors import DamagedFile, SurgeryError, count
from ckptsurgeon.files import native
from ckptsurgeon.files.chunks import Item, Place, Table
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles import splice
from ckptsurgeon.files.pickles.reader import GETATTR, read_with_globals
from ckptsurgeon.files.pickles.scan import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_NAME,
    Scan,
    scan,
)
from ckptsurgeon.files.pickles.splice import Nth
from ckptsurgeon.files.pickles.tree import WIDEST, Global, Object, axes

MOST = (2 << 30) - 1
"""Bytes of the longest `.metadata` that the native module reads: some 12 million chunks. It takes
at most four times the memory of the file, and for what torch writes about half of it."""
LONG = 4 << 20
"""Bytes from which on a pickle is worth not to be read twice."""
FIELDS = ("relative_path", "offset", "length")


def read(path: Path) -> Table:
    """What `.metadata`, or the file that was it once, says. Raises DamagedFile, or OSError if it
    can't be opened. Of long ones the last is kept: a command asks which files a step lacks, and
    then what is in it."""
    status = path.stat()
    if status.st_size < LONG:
        return _read(path)
    return _read_once(path, _identity(status))


@lru_cache(maxsize=1)
def _read_once(path: Path, identity: tuple[int, ...]) -> Table:
    return _read(path)


def all_bytes(path: Path) -> tuple[bytes, os.stat_result]:
    """Of the file, and what it was when they were read. Raises DamagedFile where it is too long, or
    nothing that is read without a wait."""
    with whole_file.regular(path) as descriptor:
        status = os.fstat(descriptor)
        if status.st_size > max(MOST, MAX_BYTES):
            what = f"it has {count(status.st_size, 'byte')}, more than {max(MOST, MAX_BYTES)}"
            raise DamagedFile(str(path), 0, what)
        try:
            return whole_file.of(descriptor, path, max(MOST, MAX_BYTES)), status
        except OSError as error:
            raise DamagedFile(str(path), 0, f"it can't be read: {error.strerror}") from None


def _read(path: Path) -> Table:
    data, status = all_bytes(path)
    table = _natively(path, data, status) or _generally(path, data)
    for file in table.files:
        if file.startswith("/") or ".." in file.split("/") or "\0" in file:
            raise DamagedFile(str(path), 0, f"the file name {file!r} leaves the folder")
    return table


# --- read natively -------------------------------------------------------------------------------


@dataclass
class _Native(Table):
    table: Any
    status: os.stat_result

    def axes(self, number: int) -> tuple[int, ...]:
        found: tuple[int, ...] = self.table.tuple(number)
        return found

    def moved(
        self, chosen: Sequence[int], places: Sequence[Place], file: str
    ) -> tuple[int, list[bytes]]:
        base = self.table.first_edit(chosen)
        with whole_file.regular(self.path) as descriptor:
            if _identity(os.fstat(descriptor)) != _identity(self.status):
                raise self._changed()
            with open(descriptor, "rb", closefd=False) as opened:
                opened.seek(base)
                pieces = self.table.moved(opened.read(), base, chosen, places, file)
        if pieces is None:
            raise self._changed()
        return base, pieces

    def _changed(self) -> SurgeryError:
        return SurgeryError(f"{self.path} changed while it was read", next="try again")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _natively(path: Path, data: bytes, status: os.stat_result) -> _Native | None:
    """None for a pickle that is not just as torch writes it."""
    if native.shards is None or len(data) > MOST:
        return None
    read = getattr(native.shards, "chunks", None)  # none in a module of older sources
    table = read and read(data, depth=MAX_DEPTH, integer=MAX_INTEGER, name=MAX_NAME)
    if table is None:
        return None
    try:
        for at, length in table.odd_texts():
            data[at : at + length].decode("utf-8", "surrogatepass")
        names = [name.decode("utf-8", "surrogatepass") for name in table.names()]
        files = [name.decode("utf-8", "surrogatepass") for name in table.files()]
        globals = frozenset(name.decode() for name in table.globals())
        wholes = [
            None if whole is None else _whole(whole[0].decode(), whole[1])
            for whole in table.wholes()
        ]
    except UnicodeDecodeError:
        return None
    return _Native(
        path, names, table.firsts().tolist(), files, wholes, table.ends(),
        globals - {*GETATTR} | table.members(),
        table.file(), table.start(), table.length(), table.offset(), table.shapes(),
        table, status,
    )  # fmt: skip


def _whole(dtype: str, size: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    module, _, name = dtype.rpartition(".")
    return (name, size) if module == "torch" and name in ITEM_BYTES else None


# --- read as any pickle --------------------------------------------------------------------------


@dataclass
class _General(Table):
    scanned: Scan
    tuples: list[tuple[int, ...]]
    numbers: array[int]
    """Of each row, the entry of `storage_data`."""
    transformed: dict[int, tuple[str, ...]]

    def axes(self, number: int) -> tuple[int, ...]:
        return self.tuples[number]

    def transforms(self, row: int) -> tuple[str, ...]:
        return self.transformed.get(row, ())

    def moved(
        self, chosen: Sequence[int], places: Sequence[Place], file: str
    ) -> tuple[int, list[bytes]]:
        edits: dict[splice.Path, Any] = {}
        for row, place in enumerate(chosen):
            if place:
                for field, new in zip(FIELDS, (file, *places[place - 1]), strict=True):
                    edits["storage_data", Nth(self.numbers[row]), field] = new
        with collector_paused():
            return 0, [splice.splice(self.scanned.data, edits, scanned=self.scanned)]


def _generally(path: Path, data: bytes) -> _General:
    if len(data) > MAX_BYTES:
        raise DamagedFile(
            str(path), 0, f"it has {len(data):,} B, more than {MAX_BYTES}, and is not of the "
            "plain form that torch writes" if native.shards is not None and len(data) <= MOST
            else f"it has {len(data):,} B, more than {MAX_BYTES}",
        )  # fmt: skip
    with collector_paused():
        scanned = scan(data, where=str(path), dense=True)
        tree, globals = read_with_globals(scanned)
        try:
            return _rows(path, scanned, tree, globals)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"this is not a Metadata of torch ({type(error).__name__}: {error})"
            raise DamagedFile(str(path), 0, what[:200]) from None


def _rows(path: Path, scanned: Scan, tree: Any, globals: frozenset[str]) -> _General:
    found: dict[str, list[Item]] = {}
    for entry, (index, info) in enumerate(tree.state["storage_data"].items()):
        item = _item(entry, index, info)
        found.setdefault(_attributes(index)["fqn"], []).append(item)
    for items in found.values():
        items.sort(key=lambda item: item.offset or ())
    rows = [item for items in found.values() for item in items]
    described = {name: _described(tree.state.get("state_dict_metadata"), name) for name in found}
    shapes: list[tuple[int, ...] | None] = []
    for name, items in found.items():
        known = described[name][1]
        alike = list(known) == [item.offset for item in items]
        shapes += list(known.values()) if alike else [None] * len(items)
    firsts = accumulate(map(len, found.values()), initial=0)
    files = {file: k for k, file in enumerate(dict.fromkeys(item.file for item in rows))}
    tuples = {each: k for k, each in enumerate(dict.fromkeys([*(i.offset for i in rows), *shapes]))}
    ends = [0] * len(files)
    for item in rows:
        ends[files[item.file]] = max(ends[files[item.file]], item.start + item.length)

    def number(axes: tuple[int, ...] | None) -> int:
        return 0 if axes is None else tuples[axes] + 1

    return _General(
        path=path,
        names=list(found),
        firsts=list(firsts),
        files=list(files),
        wholes=[whole for whole, _ in described.values()],
        ends=ends,
        globals=globals,
        file=array("I", (files[item.file] for item in rows)),
        start=array("Q", (item.start for item in rows)),
        length=array("Q", (item.length for item in rows)),
        offset=array("I", (number(item.offset) for item in rows)),
        shape=array("I", map(number, shapes)),
        scanned=scanned,
        tuples=[axes or () for axes in tuples],
        numbers=array("I", (item.number for item in rows)),
        transformed={row: item.transforms for row, item in enumerate(rows) if item.transforms},
    )


def _item(number: int, index: Any, info: Any) -> Item:
    key, value = _attributes(index), _attributes(info)
    file, start, length = (value[field] for field in FIELDS)
    whole = type(file) is str and type(start) is type(length) is int and start >= 0 < length
    if not whole or start + length >= WIDEST:
        raise ValueError(f"{key['fqn']!r} lies at {start!r} in {file!r}")
    if type(key["fqn"]) is not str:
        raise ValueError(f"{key['fqn']!r} is no name")
    offset = key.get("offset")
    return Item(
        number=number,
        file=file,
        start=start,
        length=length,
        offset=None if offset is None else axes(offset),
        transforms=tuple(value.get("transform_descriptors") or ()),
    )


def _described(
    described: Any, name: str
) -> tuple[tuple[str, tuple[int, ...]] | None, dict[tuple[int, ...], tuple[int, ...]]]:
    """Dtype and size of a tensor, and the shape of each chunk by its offset, ascending: nothing
    where the file does not say it as torch does."""
    try:
        tensor = _attributes(described[name])
        dtype, size = _attributes_or_tuple(tensor["properties"])[0], tensor["size"]
        chunks = tensor["chunks"]
    except (KeyError, TypeError, IndexError):
        return None, {}
    named = isinstance(dtype, Global) and isinstance(size, tuple)
    whole = _whole(f"{dtype.module}.{dtype.name}", axes(size)) if named else None
    try:
        pieces = [_attributes(piece) for piece in chunks]
        shapes = {axes(piece["offsets"]): axes(piece["sizes"]) for piece in pieces}
    except (KeyError, TypeError, IndexError):
        return whole, {}
    return whole, dict(sorted(shapes.items())) if len(shapes) == len(pieces) else {}


def _attributes(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Object) or not isinstance(value.state, dict):
        raise TypeError(f"{value!r:.80} has no attributes")
    return value.state


def _attributes_or_tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Object) or not isinstance(value.state, tuple):
        raise TypeError
    return value.state
