"""Cuts values out of a pickle while others still refer to them through the memo.

A value that is written once and read again by GET has its bytes at the first place. If that place
goes, its definition moves to the first GET that stays, so no reader notices.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckptsurgeon.errors import DEFECT, SurgeryError
from ckptsurgeon.files.pickles import opcodes
from ckptsurgeon.files.pickles.scan import Scan
from ckptsurgeon.plans.frozen import frozen

MAX_CHAIN = 100
"""Definitions that are moved one into the other."""


@frozen
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


class Splice(NamedTuple):
    """Bytes [start, end) become `new`."""

    start: int
    end: int
    new: bytes


def cut(scanned: Scan, cuts: Sequence[Cut]) -> list[Splice]:
    """The splices that make `cuts`. Raises SurgeryError if two of them overlap.

    Protocol 4 and 5 number the memo by counting, so there a value with a MEMOIZE in it stays where
    it is and a POP takes it off the stack. At protocol 2 and 3 this happens only to a tuple that
    holds itself, since `weights_only=True` refuses POP."""
    ordered = sorted(cuts, key=lambda item: (item.start, item.end))
    for left, right in pairwise(ordered):
        if right.start < left.end:
            raise SurgeryError(
                f"{scanned.where}: two edits overlap at byte {right.start}", next=DEFECT
            )
    memo = Memo(scanned)
    stay = {item for item in ordered if memo.must_stay(item)}
    while True:
        mover = _Mover(memo, [item for item in ordered if item not in stay])
        stuck = mover.move()
        if stuck is None:
            break
        stay.add(stuck)
    splices = [Splice(item.start, item.end, item.new) for item in mover.gone] + mover.moves
    for item in ordered:
        if item in stay:
            splices += _popped(item)
    return splices


def _popped(item: Cut) -> Iterator[Splice]:
    pop = bytes([opcodes.POP])
    last = item.values[-1][1]
    for _, end in item.values:
        yield Splice(end, end, pop + item.new if end == last else pop)
    if item.opcode is not None:
        yield Splice(item.opcode, item.opcode + 1, b"")


FEW = 32
"""Up to this many questions, each is answered by a search of the bytes; more are worth an index."""


class Memo:
    """Who sets and who reads each memo index."""

    def __init__(self, scanned: Scan) -> None:
        self.scan = scanned
        self.data = scanned.data
        self._questions = 0
        self._gets: dict[int, list[int]] = {}

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

    def index_at(self, at: int) -> int:
        """The memo index of the PUT or GET at `at`, of protocol 2 or 3."""
        if self.data[at] in (opcodes.BINPUT, opcodes.BINGET):
            return self.data[at + 1]
        return int.from_bytes(self.data[at + 1 : at + 5], "little")

    def puts_and_gets(self, start: int, end: int) -> list[int]:
        """Offsets in [start, end) of the opcodes that set or read the memo."""
        out: list[int] = []
        for offsets in (self.scan.puts, self.scan.gets):
            out += offsets[bisect.bisect_left(offsets, start) : bisect.bisect_left(offsets, end)]
        return out

    def reads(self, index: int, start: int, end: int) -> list[int]:
        """Offsets in [start, end) of the GETs of a memo index."""
        self._questions += 1
        if self._questions > FEW:
            if not self._gets:
                for at in self.scan.gets:
                    self._gets.setdefault(self.index_at(at), []).append(at)
            return [at for at in self._gets.get(index, ()) if start <= at < end]
        patterns = [struct.pack("<BI", opcodes.LONG_BINGET, index)]
        if index < 256:
            patterns.append(bytes([opcodes.BINGET, index]))
        offsets = []
        for pattern in patterns:
            at = self.data.find(pattern, start, end)
            while at >= 0:
                if at in self.scan.alias:
                    offsets.append(at)
                at = self.data.find(pattern, at + 1, end)
        return sorted(offsets)


class _Mover:
    """The definitions in the bytes that go, moved to the first GETs that stay, as `moves`.

    A definition that moves reads others by GET; those that go too are moved into it, and those
    that have moved before are read."""

    def __init__(self, memo: Memo, gone: Sequence[Cut]) -> None:
        self.memo = memo
        self.gone = gone
        self.starts = [item.start for item in gone]
        self.moves: list[Splice] = []
        self.spans: dict[int, tuple[int, int]] = {}
        self.owner: dict[int, Cut] = {}
        for item in gone:
            spans = memo.set_in(item.start, item.end)
            self.spans |= spans
            self.owner |= dict.fromkeys(spans, item)
        self.done: set[int] = set()

    def move(self) -> Cut | None:
        """Fill `moves`; a cut that can't go, if there is one: a tuple in it holds itself."""
        first_reads = []
        for index in self.spans:
            if (at := self._first_read(index)) is not None:
                first_reads.append((at, index))
        for at, index in sorted(first_reads):
            if index in self.done:
                continue
            text = self._text(index, ())
            if text is None:
                return self.owner[index]
            self.moves.append(Splice(at, at + self.memo.scan.get_size(at), text))
        return None

    def _first_read(self, index: int) -> int | None:
        """The first GET of `index` that stays."""
        for at in self.memo.reads(index, self.owner[index].end, len(self.memo.data)):
            k = bisect.bisect_right(self.starts, at) - 1
            if at >= self.gone[k].end:
                return at
        return None

    def _text(self, index: int, within: tuple[int, ...]) -> bytes | None:
        """The definition of `index` at its new place. None: it needs itself, or too many others."""
        if index in within or len(within) > MAX_CHAIN:
            return None
        within = (*within, index)
        start, end = self.spans[index]
        begins: dict[int, list[int]] = {}  # values in it, the outer first where two begin
        for other in sorted(self.memo.set_in(start, end), key=lambda i: -self.spans[i][1]):
            if other != index:
                begins.setdefault(self.spans[other][0], []).append(other)
        out: list[bytes] = []
        position = start
        for at in sorted({*begins, *self.memo.puts_and_gets(start, end)}):
            if at < position:
                continue  # in a value that has moved before
            instead = self._instead(at, begins.get(at, ()), within)
            if instead is None:
                return None
            after, new = instead
            if after > at:
                out += (self.memo.data[position:at], new)
                position = after
        return b"".join((*out, self.memo.data[position:end]))

    def _instead(
        self, at: int, begins: Sequence[int], within: tuple[int, ...]
    ) -> tuple[int, bytes] | None:
        """What stands in a moved text instead of the bytes from `at` to an end; nothing if the end
        is `at`."""
        scan = self.memo.scan
        for other in begins:
            if other in self.done:
                return self.spans[other][1], struct.pack("<BI", opcodes.LONG_BINGET, other)
            if other in within:
                return None
        if at in scan.alias:
            other = self.memo.index_at(at)
            if other in self.spans and other not in self.done:
                text = self._text(other, within)
                return None if text is None else (at + scan.get_size(at), text)
        elif scan.put_size(at):
            self.done.add(self.memo.index_at(at))
        return at, b""
