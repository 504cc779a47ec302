"""Cuts values out of a pickle while others still refer to them through the memo.

A value that is written once and read again by GET has its bytes at the first place. If that place
goes, its definition moves to the first GET that stays, so no reader notices.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import pickle_opcodes as opcodes
from ckptsurgeon.files.pickle_scan import InRun, Scan


@dataclass(frozen=True)
class Cut:
    """The bytes of `values` go (an empty span: none) and `new` comes after the last of them.

    `opcode` is the opcode that goes too, since it has nothing left to work on."""

    values: tuple[tuple[int, int], ...]
    new: bytes
    opcode: int | None = None

    @property
    def start(self) -> int:
        return self.values[0][0]

    @property
    def end(self) -> int:
        return self.values[-1][1] if self.opcode is None else self.opcode + 1


@dataclass(frozen=True)
class Splice:
    """Bytes [start, end) become `new`."""

    start: int
    end: int
    new: bytes


def cut(scanned: Scan, cuts: Sequence[Cut]) -> list[Splice]:
    """The splices that make `cuts`. Raises SurgeryError if two of them overlap.

    Protocol 4 and 5 number the memo by counting, so there a value with a MEMOIZE in it stays where
    it is and a POP takes it off the stack. At protocol 2 and 3 this happens only to a value that is
    part of a cycle, since `weights_only=True` refuses POP."""
    ordered = sorted(cuts, key=lambda item: (item.start, item.end))
    for left, right in itertools.pairwise(ordered):
        if right.start < left.end:
            raise SurgeryError(f"{scanned.where}: two edits overlap at byte {right.start}")
    if any(item.start <= value < item.end for item in ordered for value in scanned.runs):
        raise InRun
    memo = _Memo(scanned)
    kept = {item for item in ordered if memo.must_stay(item)}
    while True:
        gone = [item for item in ordered if item not in kept]
        moves: list[Splice] = []
        for item in gone:
            found = _moves(memo, item, gone)
            if found is None:
                kept.add(item)
                break
            moves += found
        else:
            break
    splices = [Splice(item.start, item.end, item.new) for item in gone]
    for item in ordered:
        if item not in kept:
            continue
        for _, end in item.values:
            new = bytes([opcodes.POP]) + (item.new if end == item.values[-1][1] else b"")
            splices.append(Splice(end, end, new))
        if item.opcode is not None:
            splices.append(Splice(item.opcode, item.opcode + 1, b""))
    return splices + moves


class _Memo:
    """Who sets and who reads each memo index."""

    def __init__(self, scanned: Scan) -> None:
        self.scan = scanned
        self.data = scanned.data

    def must_stay(self, item: Cut) -> bool:
        if self.scan.protocol >= 4:
            return bool(self.set_in(item.start, item.end))
        return any(
            item.start < end <= item.end and self.data[start] != opcodes.FRAME
            for end, start in self.scan.gaps.items()
        )

    def set_in(self, start: int, end: int) -> dict[int, tuple[int, int]]:
        """The memo indices that are set in [start, end), and the bytes of their values."""
        puts = self.scan.puts
        first, last = bisect.bisect_left(puts, start), bisect.bisect_left(puts, end)
        return {self.scan.put_index(k): self._span(k) for k in range(first, last)}

    def _span(self, k: int) -> tuple[int, int]:
        put, value = self.scan.puts[k], self.scan.memo[self.scan.put_index(k)]
        fillings = [*self.scan.grown.get(value, ()), *self.scan.built.get(value, ())]
        end = put + self.scan.put_size(put)
        return self.scan.start(value), max([end, *(opcode + 1 for opcode, _ in fillings)])

    def reads(self, index: int, start: int, end: int) -> list[int]:
        """Offsets in [start, end) of the GETs of a memo index."""
        patterns = [struct.pack("<BI", opcodes.LONG_BINGET, index)]
        if index < 256:
            patterns.append(bytes([opcodes.BINGET, index]))
        found = []
        for pattern in patterns:
            at = self.data.find(pattern, start, end)
            while at >= 0:
                if at in self.scan.alias:
                    found.append(at)
                elif self.scan.runs:
                    raise InRun
                at = self.data.find(pattern, at + 1, end)
        return sorted(found)


def _moves(memo: _Memo, item: Cut, gone: Sequence[Cut]) -> list[Splice] | None:
    """The GETs that become definitions because `item` takes the definitions away. None: what would
    move reads a memo index that has no place to move to before it."""
    starts = [other.start for other in gone]
    spans = memo.set_in(item.start, item.end)
    first_read: dict[int, int] = {}
    for index in spans:
        for at in memo.reads(index, item.end, len(memo.data)):
            k = bisect.bisect_right(starts, at) - 1
            if k < 0 or at >= gone[k].end:
                first_read[index] = at
                break
    out: list[Splice] = []
    moved: dict[int, tuple[int, int]] = {}
    for index, at in sorted(first_read.items(), key=lambda pair: pair[1]):
        if index in moved:
            continue
        pieces = _unmoved(spans[index], moved)
        here = {i for piece in pieces for i in memo.set_in(*piece)}
        for other in spans.keys() - here - moved.keys():
            if any(memo.reads(other, *piece) for piece in pieces):
                return None
        out.append(Splice(at, at + memo.scan.get_size(at), _definition(memo, spans[index], moved)))
        moved |= {i: spans[i] for i in here}
    return out


def _inside(span: tuple[int, int], moved: Mapping[int, tuple[int, int]]) -> Iterator[Splice]:
    """The outermost moved values inside `span`, as GETs of them."""
    position = span[0]
    for index, (start, end) in sorted(moved.items(), key=lambda pair: (pair[1][0], -pair[1][1])):
        if position <= start and end <= span[1]:
            yield Splice(start, end, struct.pack("<BI", opcodes.LONG_BINGET, index))
            position = end


def _unmoved(span: tuple[int, int], moved: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
    position, out = span[0], []
    for inner in _inside(span, moved):
        out.append((position, inner.start))
        position = inner.end
    return [*out, (position, span[1])]


def _definition(memo: _Memo, span: tuple[int, int], moved: Mapping[int, tuple[int, int]]) -> bytes:
    """The bytes of `span`, in which what has moved before is read by GET."""
    out, position = b"", span[0]
    for inner in _inside(span, moved):
        out += memo.data[position : inner.start] + inner.new
        position = inner.end
    return out + memo.data[position : span[1]]
