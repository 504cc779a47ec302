"""Plain values that a surgery is made of: changes, which the user reads, and edits of files.

Every path is a POSIX string relative to the run's root (it starts with `..` when a log directory
lies outside). Nothing here reads or writes the disk. Each value survives JSON and `from_json`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from ckptsurgeon.plans.frozen import frozen, held
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.plans.sources import Numbers, Range
from ckptsurgeon.plans.spans import SHORT_GAP, rows, total


def relative(path: Path, root: Path) -> str:
    """`path` as edits name it: POSIX, from the run's root, `..` when it lies outside."""
    name, start = str(path), f"{root}/"
    if name.startswith(start) and "/.." not in name:  # nearly always, and ten times as fast
        return name[len(start) :]
    return Path(os.path.relpath(path, root)).as_posix()


Scalar: TypeAlias = bool | int | float | str | None
Value: TypeAlias = Scalar | list[Any] | tuple[Any, ...]
Key: TypeAlias = str | int
ZEROS = "zeros"
"""`Change.new` of a tensor whose every element becomes 0."""
ABSENT = "absent"
"""`Change.old` of a dict key that is not there yet, `Change.new` of one that goes."""


@frozen
class Fill:
    """`Change.new` of a tensor of bytes whose every element becomes `byte`: the code of 0 where
    numbers are quantized."""

    byte: int

    def __str__(self) -> str:
        return f"zeros (code {self.byte})"


@frozen
class Renamed:
    """`Change.new` of a dict key that becomes `key`, its value staying; `NewName.new` of a file."""

    key: str

    def __str__(self) -> str:
        return self.key


@frozen
class Elements:
    """`Change.new` of a tensor whose elements get these bytes, which a plan calls `label`."""

    data: bytes
    label: str

    def __str__(self) -> str:
        return self.label


@frozen
class Computed:
    """`Change.new` of a tensor whose elements are computed when they are written; `label` is what
    a plan calls them. Also the bytes themselves, as a piece of a file.

    Each of `terms` has one number for each element, in one or more sources one after the other.
    `rule` says what becomes of them with `numbers`: `copy` takes the one term as it is, `scale`
    multiplies it by a number, `ceiling` takes the lesser of both, `shrink` multiplies the first by
    the root of a number over the second where that is below 1, `mean` weighs the terms. The result
    is rounded to `via`, if that is given, and then to `dtype`; to nearest, ties to even."""

    rule: str
    dtype: str
    size: int
    terms: tuple[tuple[Numbers, ...], ...]
    numbers: tuple[float, ...] = ()
    via: str = ""
    label: str = ""

    def __str__(self) -> str:
        return self.label


# --- changes: what the user reads ----------------------------------------------------------------


@frozen
class Each:
    """Each of these keys in turn, as a step of the path of a `Change` that is made under all of
    them: the moments of 10,000 parameters of one file are two changes."""

    keys: tuple[Key, ...]


def each_path(path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Every path that one with an `Each` stands for."""
    return product(*(step.keys if isinstance(step, Each) else (step,) for step in path))


@held
class Change:
    """One field in one place, or in several of one file that have the same old and new value.

    `path` is the key path inside the pickle of a shard (dict keys, list indices, attribute names),
    in which one step may be `Each`; `paths` says where it leads, and where it is empty the file is
    one value. `new` may be `ZEROS`, `Elements` or `Computed`, of the whole tensor or of its
    flattened `elements` [start, end), or a `Fill`. `chunks` counts the pieces of a tensor that is
    changed in all of them."""

    file: str
    field: str
    old: Value
    new: Value | Fill | Elements | Computed | Renamed
    path: tuple[Key | Each, ...] = ()
    elements: tuple[int, int] | None = None
    chunks: int = 1

    @property
    def places(self) -> int:
        """How many paths there are."""
        return prod(len(step.keys) for step in self.path if isinstance(step, Each))

    def paths(self) -> Iterator[tuple[Key, ...]]:
        """The path to each place."""
        return each_path(self.path)

    def single(self) -> list[Change]:
        """The same as changes of one place each."""
        if not any(isinstance(step, Each) for step in self.path):
            return [self]
        return [replace(self, path=path) for path in self.paths()]


@held
class NewText(Change):
    """A small file of text, as a pointer is, whose whole text becomes `new`; `old` is None where
    it is not there yet. It has no `path`."""


@held
class NewName(Change):
    """A file that gets the name `new`, a `Renamed`, in its folder; it has no `path`."""


@held
class NewStep(NewName):
    """The folder of a step, or one of its files, by whose new name it is step `step`."""

    step: int = 0


@held
class Aside:
    """A checkpoint or a log that goes to the attic as it is."""

    file: str
    field: str


@frozen
class Span:
    """Bytes [start, end) of an existing file."""

    file: str
    start: int
    end: int

    def ranges(self) -> Iterator[Range]:
        """What is read."""
        yield self.file, self.start, self.end


@frozen
class Hole:
    """So many zeros, which take no room where the file system has holes."""

    size: int


@frozen
class Checksum:
    """4 bytes: the CRC-32 of the `length` bytes that begin `distance` bytes after this piece's own
    first byte (before it where that is below 0), known once those are written."""

    distance: int
    length: int
    size: int = 4


Piece: TypeAlias = bytes | Span | Hole | Computed | Checksum


@frozen
class Content:
    """The bytes of a new file, in order: literal bytes, spans of existing files, holes, and what
    is computed when it is written.

    `mtime_ns` is set on the new file when given: an event file keeps the time of its last event.
    """

    pieces: tuple[Piece, ...]
    mtime_ns: int | None = None

    @property
    def size(self) -> int:
        return sum(map(length, self.pieces))


def length(piece: Piece) -> int:
    """Bytes of one piece of a file."""
    if isinstance(piece, Span):
        return piece.end - piece.start
    return len(piece) if isinstance(piece, bytes) else piece.size


@frozen
class Link:
    """A symbolic link that says `target`, where a `Content` would be a file."""

    target: str

    @property
    def size(self) -> int:
        return len(os.fsencode(self.target))


@held
class Rewrite:
    """A file that gets new bytes, or a new one when `new_file`."""

    file: str
    field: str
    content: Content | Queries
    note: str
    new_file: bool = False


@held
class Relink:
    """A symbolic link that leads to `new` in place of `old`: both are the text of the link, or ""
    where there is a file."""

    file: str
    field: str
    old: str
    new: str


AnyChange: TypeAlias = Change | NewText | NewName | NewStep | Aside | Rewrite | Relink


# --- edits: what the disk gets -------------------------------------------------------------------


@frozen
class Move:
    """Rename `src` to `dst`, which does not exist. With `content`, `src` is first staged from it,
    so a new file is a Move too; it gets the rights of the file `like`. Inverse: the move back.
    A journal says by `ino` and `mtime_ns` which file it is."""

    src: str
    dst: str
    content: Content | None = None
    like: str | None = None
    ino: int = 0
    mtime_ns: int | None = None


@frozen
class Replace:
    """`file` is linked to `kept`, then `staged` is renamed over it: `file` exists at every moment.
    `staged` is written from `content`, or is there already when `content` is None (undo).
    Inverse: the same with `kept` as the staged file. Either of both may be a symbolic link, which
    is never followed."""

    file: str
    staged: str
    kept: str
    content: Content | Link | Queries | None = None


@frozen
class Append:
    """Bytes after the last byte of `file`: those of `data`, one after the other, go to the `spans`
    [start, end), which ascend. What no span covers is zeros, and a hole where they are more than
    SHORT_GAP.

    The last span makes the new state visible to a reader: all others are durable before it.
    Every byte before `old_size` stays as it is. `mtime_ns` is the time of the file before; it gets
    `new_mtime_ns`, which the commit fills in. Inverse: `Truncate`."""

    file: str
    old_size: int
    data: bytes
    spans: tuple[tuple[int, int], ...]
    mtime_ns: int
    new_mtime_ns: int | None = None

    @classmethod
    def of(
        cls, file: str, old_size: int, writes: Iterable[tuple[int, bytes]], mtime_ns: int
    ) -> Append:
        """The Append that makes these writes of (offset, bytes)."""
        writes = tuple(writes)
        spans = tuple((offset, offset + len(data)) for offset, data in writes)
        return cls(file, old_size, b"".join(data for _, data in writes), spans, mtime_ns)

    @property
    def new_size(self) -> int:
        return self.spans[-1][1]

    @property
    def writes(self) -> Iterator[tuple[int, bytes]]:
        """The offset and the bytes of each span."""
        at = 0
        for start, end in self.spans:
            yield start, self.data[at : at + end - start]
            at += end - start

    @property
    def runs(self) -> list[tuple[int, int]]:
        """What the disk gets: the spans, joined where no more than SHORT_GAP is between them."""
        return [(row[0][0], row[-1][1]) for row in rows(self.spans, SHORT_GAP)]

    @cached_property
    def digest(self) -> str:
        """sha256 of the bytes, in order."""
        return hashlib.sha256(self.data).hexdigest()

    def whole(self) -> Content:
        """All bytes of `file` once this is done."""
        pieces: list[Piece] = [Span(self.file, 0, self.old_size)]
        end = self.old_size
        for offset, data in self.writes:
            if offset > end:
                pieces.append(Hole(offset - end))
            pieces.append(data)
            end = offset + len(data)
        return Content(tuple(pieces))


@frozen
class Truncate:
    """The inverse of `Append`: `file` has `new_size` bytes and gets its old size and time back.

    `spans` are the [start, end) of the appended writes and `digest` is the sha256 of their bytes: a
    tail that differs is not ours and stays. With `new_mtime_ns` as its time, nobody wrote to the
    file since; None in receipts from before that was kept. Inverse: `Tail`."""

    file: str
    old_size: int
    new_size: int
    digest: str
    spans: tuple[tuple[int, int], ...]
    mtime_ns: int
    new_mtime_ns: int | None = None


@frozen
class Tail:
    """An Append whose bytes lie in a file of tails, from `at` on: the staged one in the journal, in
    the receipt of an undo that which its attic has. `spans` are [start, end) in `file`; `anchor` is
    the sha256 of the bytes right before `old_size`, not kept in a receipt."""

    file: str
    old_size: int
    spans: tuple[tuple[int, int], ...]
    at: int
    digest: str
    anchor: str
    mtime_ns: int | None = None
    new_mtime_ns: int | None = None

    @property
    def size(self) -> int:
        """How many bytes of the file of tails are its own."""
        return total(self.spans)

    @property
    def cut(self) -> int:
        """The size at which a reader finds no end record."""
        return self.spans[-1][0]


Edit: TypeAlias = Move | Replace | Append | Truncate
Inverse: TypeAlias = Move | Replace | Truncate | Tail
"""What a receipt keeps to take an edit back."""
