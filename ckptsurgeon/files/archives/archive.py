"""One file that `torch.save` wrote, read from its directory and pickle; tensor bytes stay on disk.

Torch reads the pickle and the storages of the folder that the first entry names; so does this.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import DamagedFile, SurgeryError, count
from ckptsurgeon.files.archives import legacy
from ckptsurgeon.files.archives.ends import Ends
from ckptsurgeon.files.archives.zip_directory import (
    UNKNOWN,
    Directory,
    Record,
    Records,
    payload,
    read_directory,
)
from ckptsurgeon.files.dtypes import ITEM_BYTES, element, number
from ckptsurgeon.files.pickles.reader import read
from ckptsurgeon.files.pickles.scan import MAX_BYTES, Scan, scan
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.remote import reads
from ckptsurgeon.transaction import crc32

PICKLE = "data.pkl"
TORCHSCRIPT = "constants.pkl"
"""An archive that has it, torch.load gives to the TorchScript loader."""
HEAD = 512
"""Bytes of a local header with a name of usual length, and of one element."""
CHUNK = 1 << 20
"""Bytes of a tensor that are read at once."""
FEW_NUMBERS = 8
"""Tensors of one element that are read with the tree."""


class Archive:
    """A torch file as it was when it was opened: any later change of the file is an error.

    It is the whole file, or `size` bytes from `start` on; all offsets count from there.
    `records` are its parts by name without the folder: `data.pkl` and one `data/<key>` for each
    storage. `directory` is None if the format is that of before torch 1.6, without CRCs."""

    size: int
    is_link: bool  # its name
    folder: str
    records: Mapping[str, Record]
    directory: Directory | None
    status: os.stat_result

    def __init__(self, path: Path, start: int, where: str) -> None:
        """Of use only once its records are read: `open` is the way to make one."""
        self.path, self.start, self.where = path, start, where
        self._length: int | None = None
        self._tree: Any = None
        self._globals: frozenset[str] = frozenset()
        self._scan: Scan | None = None
        self._order: str | None = None
        self._descriptor: int | None = None
        self._at_first_read: contextlib.ExitStack | None = None
        self._ends: Ends | None = None
        self._numbers: dict[tuple[str, int, str], int | float | bool] = {}
        self._single: set[tuple[str, str]] = set()

    @classmethod
    def open(cls, path: Path, start: int = 0, length: int | None = None) -> Archive:
        """Read the directory of `path`, or of `length` bytes in it. Raises DamagedFile, or OSError
        if it can't be opened."""
        with cls.opening(path, start, length) as archive:
            return archive

    @classmethod
    @contextlib.contextmanager
    def opening(cls, path: Path, start: int = 0, length: int | None = None) -> Iterator[Archive]:
        """The same, and the file stays open for all reads inside, as in `reading`. Raises
        SurgeryError if it changed meanwhile."""
        archive = cls(path, start, str(path) if length is None else f"{path}, from byte {start} on")
        archive._length = length
        descriptor, archive.is_link = reads.opened_even_by_link(path, os.O_NONBLOCK)
        try:
            archive._descriptor = descriptor
            archive._read_records(descriptor, length)
            yield archive
            if _identity(reads.status(descriptor)) != _identity(archive.status):
                raise _changed(path)
        finally:
            archive._descriptor = archive._ends = None
            os.close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads it anew, and refuses a file that has changed since."""
        seen = self.status.st_size, self.status.st_mtime_ns
        return _elsewhere, (type(self), self.path, self.start, self._length, seen)

    def _read_records(self, descriptor: int, length: int | None) -> None:
        self.status = reads.status(descriptor)
        if not stat.S_ISREG(self.status.st_mode):
            raise DamagedFile(self.where, 0, "this is not a regular file")
        self.size = self.status.st_size - self.start if length is None else length
        self._ends = Ends(self.path, descriptor, self.start, self.size)
        if self.read_at(0, min(4, self.size)) == b"PK\3\4":
            self.directory = read_directory(self.where, self.size, self.read_at)
            self.folder, self.records = self.directory.folder, self.directory.records
        else:
            self.directory, self.folder = None, ""
            self.records = legacy.read_records(self.where, self.size, self.read_at)
        if PICKLE not in self.records:
            raise DamagedFile(self.where, self.size, f"the archive has no {PICKLE}")
        if TORCHSCRIPT in self.records:
            what = f"{TORCHSCRIPT} makes this a TorchScript program"
            raise DamagedFile(self.where, self.records[TORCHSCRIPT].offset, what)

    def is_current(self) -> bool:
        """Whether the path still leads to the file that was opened, by inode, size and time."""
        with contextlib.suppress(OSError):
            return _identity(reads.status(self.path)) == _identity(self.status)
        return False

    def read_at(self, offset: int, length: int) -> bytes:
        """Bytes of the file. Raises SurgeryError if it is not the file that was opened."""
        if self._ends is not None and (data := self._ends.get(offset, length)) is not None:
            return data
        if self._descriptor is not None or self._at_first_read is not None:
            return reads.bytes_at(self.path, self._file(), self.start + offset, length)
        with self.opened() as descriptor:
            return reads.bytes_at(self.path, descriptor, self.start + offset, length)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Archive]:
        """Opens the file once, at the first of the reads inside, which are those of one thread."""
        if self._descriptor is not None or self._at_first_read is not None:
            yield self
            return
        with contextlib.ExitStack() as stack:
            self._at_first_read = stack
            try:
                yield self
            finally:
                self._descriptor = self._at_first_read = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of its own, for a thread. Raises SurgeryError if the file is another now."""
        descriptor = reads.opened(self.path)
        try:
            if _identity(reads.status(descriptor)) != _identity(self.status):
                raise _changed(self.path)
            yield descriptor
        finally:
            os.close(descriptor)

    def expect(self, names: Iterable[str]) -> None:
        """The first bytes of these records are read next: their headers, and what is short. Inside
        `reading`."""
        found = (record for name in names if (record := self.records.get(name)) is not None)
        starts = (self.start + record.offset for record in found)
        reads.need(self._file(), ((start, start + HEAD) for start in starts))

    def next_data(self, offset: int, end: int) -> int:
        """The first byte from `offset` that is in no hole of the file, or `end`. Inside `reading`,
        and as exact as the file system: one without holes has data everywhere."""
        return self._next(os.SEEK_DATA, offset, end)

    def next_hole(self, offset: int, end: int) -> int:
        """The first byte from `offset` that is in a hole, or `end`. Inside `reading`."""
        return self._next(os.SEEK_HOLE, offset, end)

    def _next(self, kind: int, offset: int, end: int) -> int:
        place = reads.seek(self._file(), self.start + offset, kind)
        if place is None:
            return offset if kind == os.SEEK_DATA else end
        return min(place - self.start, end)

    def _file(self) -> int:
        if (descriptor := self._descriptor) is None:
            if self._at_first_read is None:
                raise ValueError("the file is not open")
            descriptor = self._descriptor = self._at_first_read.enter_context(self.opened())
        return descriptor

    def payload(self, name: str) -> int:
        """Where the bytes of a record start. Raises DamagedFile if torch might read others."""
        record = self.record(name)
        if self.directory is None:
            return record.offset
        return payload(self.where, self.directory, record, self.read_at)

    def record(self, name: str) -> Record:
        if (record := self.records.get(name)) is None:
            raise DamagedFile(self.where, self.size, f"no record {name!r}")
        return record

    def descriptor(self, name: str) -> int:
        """Bytes of the data descriptor behind a record, which repeats its CRC and sizes: 16, or 24
        where the sizes take 8 bytes each (torch: from 4 GiB on, of the size or of the offset). 0:
        there is none, or none that says the same."""
        record = self.record(name)
        after = self.read_at(self.payload(name) + record.size, 24)
        head = b"PK\7\x08" + record.crc.to_bytes(4, "little")
        for width in (4, 8):
            if record.size < 1 << 8 * width:
                sizes = [size.to_bytes(width, "little") for size in (record.packed, record.size)]
                if after.startswith(head + b"".join(sizes)):
                    return len(head) + 2 * width
        return 0

    def pickle(self) -> bytes:
        """The bytes of data.pkl, checked by their CRC (0 stands for "not computed")."""
        return self._pickle()[1]

    def _pickle(self) -> tuple[int, bytes]:
        record = self.record(PICKLE)
        if self._ends is not None:
            self._ends.expect(record.offset, min(HEAD + record.size, self.size - record.offset))
        start = self.payload(PICKLE)
        if record.size > MAX_BYTES:
            raise DamagedFile(self.where, start, f"{PICKLE} has {count(record.size, 'byte')}")
        data = self.read_at(start, record.size)
        if record.crc and zlib.crc32(data) != record.crc:
            raise DamagedFile(self.where, start, f"{PICKLE} does not have its CRC")
        return start, data

    def scan(self, *, keep: bool = False) -> Scan:
        """Where the values of data.pkl stand. It is far larger than the tree, so it is kept for
        the next call only on demand."""
        if (scanned := self._scan) is None:
            start, data = self._pickle()
            scanned = scan(data, where=self.where, base=start)
        if keep:
            self._scan = scanned
        return scanned

    def tree(self, scanned: Scan | None = None) -> Any:
        """The inert tree of data.pkl, see `reader.read`. The same one at each call.
        `scanned` is what `scan` gave, if it is there already."""
        if self._tree is None:
            self._tree, self._globals, self._single = read(scanned or self.scan())
        return self._tree

    def globals(self) -> frozenset[str]:
        """Every `module.name` that loading data.pkl would import."""
        self.tree()
        return self._globals

    def storage(self, tensor: Tensor) -> Record:
        """The record of the elements. Raises DamagedFile if it does not hold as many as said."""
        record = self.record(f"data/{tensor.storage}")
        if record.size != tensor.storage_numel * ITEM_BYTES[tensor.dtype]:
            held, due = count(record.size, "byte"), count(tensor.storage_numel, "element")
            what = f"storage {tensor.storage!r} has {held}, not {due} of {tensor.dtype}"
            raise DamagedFile(self.where, record.offset, what)
        last = tensor.offset
        for size, stride in zip(tensor.size, tensor.stride, strict=True):
            last += (size - 1) * stride
        inside = 0 <= tensor.offset <= last < tensor.storage_numel
        if tensor.numel and not (inside and min(tensor.stride, default=0) >= 0):
            what = f"a tensor leaves the storage {tensor.storage!r}"
            raise DamagedFile(self.where, record.offset, what)
        return record

    def check_storages(self, tensors: Sequence[Tensor]) -> None:
        """Raise as `storage` does for any of them."""
        for tensor, known in zip(tensors, self._sums(tensors)[0], strict=True):
            if known != tensor.storage_numel * ITEM_BYTES[tensor.dtype] or not tensor.whole:
                self.storage(tensor)

    def are_zeros(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Of each what `is_zero` says."""
        return [
            (size == UNKNOWN or (crc != 0 and crc == crc32.of_zeros(size))) and self.is_zero(tensor)
            for tensor, size, crc in zip(tensors, *self._sums(tensors), strict=True)
        ]

    def _sums(self, tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
        """Size and CRC of the storage of each; UNKNOWN where its record must be asked."""
        if not isinstance(self.records, Records):
            return [UNKNOWN] * len(tensors), [UNKNOWN] * len(tensors)
        return self.records.sums(tensors)

    def value(self, tensor: Tensor) -> int | float | bool:
        """The number in a tensor of one element, such as Adam's step."""
        if tensor.numel != 1:
            raise ValueError(f"a tensor of {count(tensor.numel, 'element')} has no one value")
        key = (tensor.storage, tensor.offset, tensor.dtype)
        if key not in self._numbers:
            self.storage(tensor)
            width = ITEM_BYTES[tensor.dtype]
            start = self.payload(f"data/{tensor.storage}") + tensor.offset * width
            self._numbers[key] = self._number(tensor.dtype, self.read_at(start, width))
        return self._numbers[key]

    def values(self, tensors: Sequence[Tensor]) -> list[int | float | bool]:
        """The number in each tensor of one element. At stage 0 each parameter has its own step."""
        keys = [(tensor.storage, tensor.offset, tensor.dtype) for tensor in tensors]
        if not all(map(self._numbers.__contains__, keys)):
            with self.reading():
                self._fetch(tensors)
                for key, tensor in zip(keys, tensors, strict=True):
                    if key not in self._numbers:
                        self.value(tensor)
        return [self._numbers[key] for key in keys]

    def read_numbers(self) -> None:
        """Read what `value` will be asked of each shard, such as Adam's step, while the file is
        open. What is wrong with a number is found when it is asked for."""
        few = sorted(self._single)[:FEW_NUMBERS]
        self.expect(f"data/{key}" for key, _ in few)
        with contextlib.suppress(SurgeryError):
            for key, dtype in few:
                self.value(Tensor(dtype, key, 1, 0, (), ()))

    def _fetch(self, tensors: Sequence[Tensor]) -> None:
        """Read at once what `value` will be asked for, where the native module can tell: storages
        of one element."""
        alone = (t for t in tensors if t.storage_numel == 1 and not (t.size or t.offset))
        scalars = [t for t in alone if t.storage.isascii()]
        names = [f"data/{tensor.storage}" for tensor in scalars]
        self.expect(names)
        if not isinstance(self.records, Records) or self.start or not scalars:
            return
        widths = [ITEM_BYTES[tensor.dtype] for tensor in scalars]
        elements = self.records.elements(self._file(), names, widths)
        known: dict[tuple[str, bytes], int | float | bool] = {}
        for tensor, data in zip(scalars, elements, strict=True):
            if data is not None:
                key = (tensor.dtype, data)
                if key not in known:
                    known[key] = self._number(*key)
                self._numbers[tensor.storage, 0, tensor.dtype] = known[key]

    def is_zero(
        self, tensor: Tensor, elements: tuple[int, int] | None = None, byte: int = 0
    ) -> bool:
        """Whether the whole storage is zeros by its CRC; False too where there is no CRC. Of
        `elements` [start, end) of a flat tensor, whether they are zeros by their bytes. `byte` is
        what all bytes of zeros are."""
        if elements is None:
            record = self.record(f"data/{tensor.storage}")
            zero = record.crc != 0 and record.crc == crc32.of_repeated(byte, record.size)
            return zero and self.storage(tensor) is not None
        self.storage(tensor)
        start, end = (
            self.payload(f"data/{tensor.storage}") + (tensor.offset + i) * ITEM_BYTES[tensor.dtype]
            for i in elements
        )
        return all(
            not self.read_at(begin, min(CHUNK, end - begin)).strip(bytes([byte]))
            for begin in range(start, end, CHUNK)
        )

    def byte_order(self) -> str:
        """`<` or `>`, as the file says; files that say nothing are little-endian."""
        if self._order is None:
            self._order = "<"
            if (record := self.records.get("byteorder")) is not None and record.size == 3:
                text = self.read_at(self.payload("byteorder"), 3)
                self._order = ">" if text == b"big" else "<"
        return self._order

    def encode(self, dtype: str, value: int | float | bool) -> bytes:
        """The element that holds `value`. Raises SurgeryError if `dtype` can't."""
        try:
            return element(value, dtype, self.byte_order())
        except ValueError:
            what = f"{self.path}: a tensor of {dtype} can't hold {value!r}"
            raise SurgeryError(what, next=f"choose a number that {dtype} can hold") from None

    def _number(self, dtype: str, data: bytes) -> int | float | bool:
        try:
            return number(data, dtype, self.byte_order())
        except KeyError:
            what = f"{self.path}: a value of dtype {dtype} can't be read"
            raise SurgeryError(what, next="save the checkpoint again with a newer torch") from None


def _elsewhere(
    kind: type[Archive], path: Path, start: int, length: int | None, seen: tuple[int, int]
) -> Archive:
    """Of another host, which numbers files in its own way."""
    archive = kind.open(path, start, length)
    if (archive.status.st_size, archive.status.st_mtime_ns) != seen:
        raise _changed(path)
    return archive


def _changed(path: Path) -> SurgeryError:
    return SurgeryError(f"{path} changed while it was read", next="try again")


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
