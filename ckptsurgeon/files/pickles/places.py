"""Where the values of a pickle stand, as `scan` finds them.

A value is known by the offset of the opcode that makes it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.pickles.opcodes import BINGET, BINPUT, LONG_BINPUT


class CutShort(DamagedFile):
    """The pickle, or a value in it, ends after the last byte there is."""


T = TypeVar("T")


class LazyDict(dict[int, T]):
    """A dict that asks a function for what it does not hold; None says that there is none."""

    def __init__(self, ask: Callable[[int], T | None]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, key: int) -> T:
        value = self._ask(key)
        if value is None:
            raise KeyError(key)
        self[key] = value
        return value

    def get(self, key: int, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and self.get(key) is not None


@dataclass
class Scan:
    """Where the values of one pickle stand.

    `parts` of a tuple, object, or persistent id are the values it is made of (after the mark, when
    there is one); `grown` of a container are the (opcode offset, values) that fill it, where the
    values of SETITEMS, APPENDS and ADDITEMS come after their mark; `built` of an object are the
    (opcode offset, state). `alias` leads from each GET to the value it stands for; `puts` and
    `gets` are the offsets of these opcodes. `gaps` leads from the end of bytes that belong to no
    value (a FRAME, popped values) to their start. `native` is the same scan in the module
    `_shards`, if that has made it: then the dicts ask it, one key at a time. `dense` is whether
    many short values were expected."""

    data: bytes
    where: str
    base: int
    dense: bool = False
    protocol: int = 0
    root: int = 0
    stop: int = 0
    parts: dict[int, list[int]] = field(default_factory=dict)
    grown: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)
    built: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    memo: dict[int, int] = field(default_factory=dict)
    puts: Sequence[int] = ()
    gets: Sequence[int] = ()
    alias: dict[int, int] = field(default_factory=dict)
    frames: list[tuple[int, int]] = field(default_factory=list)
    gaps: dict[int, int] = field(default_factory=dict)
    long_keys: int = 0
    native: Any = None

    def start(self, value: int) -> int:
        """First byte of `value`."""
        while (parts := self.parts.get(value)) is not None:
            value = parts[0]
        return value

    def made(self, value: int) -> int:
        """The value that `value` stands for, if it is a GET."""
        return self.alias.get(value, value)

    def memo_index(self, value: int) -> int | None:
        """The memo index of a container or tuple, if it has one: its PUT follows right after."""
        at = bisect.bisect_left(self.puts, value + 1)
        if at < len(self.puts) and self.puts[at] == value + 1:
            return self.put_index(at)
        return None

    def put_index(self, k: int) -> int:
        """The memo index that the k-th PUT sets."""
        put = self.puts[k]
        if self.data[put] == BINPUT:
            return self.data[put + 1]
        if self.data[put] == LONG_BINPUT:
            return int.from_bytes(self.data[put + 1 : put + 5], "little")
        return k

    def put_size(self, offset: int) -> int:
        """Bytes of the opcode at `offset` if it sets a memo index, else 0."""
        at = bisect.bisect_left(self.puts, offset)
        if at == len(self.puts) or self.puts[at] != offset:
            return 0
        return {BINPUT: 2, LONG_BINPUT: 5}.get(self.data[offset], 1)

    def get_size(self, offset: int) -> int:
        """Bytes of the GET at `offset`."""
        return 2 if self.data[offset] == BINGET else 5

    def damaged(self, offset: int, what: str) -> DamagedFile:
        return DamagedFile(self.where or "pickle", self.base + offset, what)

    def cut_short(self, offset: int, what: str) -> CutShort:
        return CutShort(self.where or "pickle", self.base + offset, what)
