"""Where the values of a pickle stand, as `pickle_scan` finds them.

A value is known by the offset of the opcode that makes it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.pickles.opcodes import BINGET, BINPUT, LONG_BINGET, LONG_BINPUT


class CutShort(DamagedFile):
    """The pickle, or a value in it, ends after the last byte there is."""


class InRun(Exception):
    """What is asked for lies in a run of opcodes that the scan has stepped over."""


T = TypeVar("T")


class Asked(dict[int, T]):
    """A dict that asks a function for what it does not hold; None says that there is none."""

    def __init__(self, ask: Callable[[int], T | None]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, key: int) -> T:
        found = self._ask(key)
        if found is None:
            raise KeyError(key)
        self[key] = found
        return found

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
    value (a FRAME, popped values) to their start. `runs` leads from the values that were stepped
    over to their ends: what is in them is not told; `sure` are values whose memo index no run sets
    again. `native` is the same scan in the module `_shards`, if that has made it: then there are no
    runs, and the dicts ask it."""

    data: bytes
    where: str
    base: int
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
    runs: dict[int, int] = field(default_factory=dict)
    sure: set[int] = field(default_factory=set)
    long_keys: int = 0
    native: Any = None
    _begins: list[int] = field(default_factory=list)

    def start(self, value: int) -> int:
        """First byte of `value`."""
        while (parts := self.parts.get(value)) is not None:
            value = parts[0]
        return value

    def made(self, value: int) -> int:
        """The value that `value` stands for, if it is a GET. Raises InRun if only a whole scan
        can tell."""
        if value in self.runs:
            raise InRun
        target = self.alias.get(value)
        if target is None:
            return value
        if self.runs and target not in self.sure:
            # A run may set the same index again; if no bytes look like that, none does.
            put = bytes([LONG_BINPUT]) + self.data[value + 1 : value + 5]
            again = self.data[value] == LONG_BINGET and self.data.count(put) > 1
            if target in self.runs or again:
                raise InRun
            self.sure.add(target)
        return target

    def memo_index(self, value: int) -> int | None:
        """The memo index of a container or tuple, if it has one: its PUT follows right after."""
        at = bisect.bisect_left(self.puts, value + 1)
        if at < len(self.puts) and self.puts[at] == value + 1:
            return self.put_index(at)
        return None

    def has_run(self, start: int, end: int) -> bool:
        """Whether a run begins in [start, end)."""
        if len(self._begins) != len(self.runs):
            self._begins = list(self.runs)
        return bisect.bisect_left(self._begins, start) < bisect.bisect_left(self._begins, end)

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
