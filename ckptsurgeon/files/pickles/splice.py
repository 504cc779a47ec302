"""Sets, inserts and deletes values in a pickle by splicing their bytes; all other bytes stay.

`splice` runs no code of the file and knows no class: it replaces the bytes between which a value
stands, so what it does not touch loads as before.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

from ckptsurgeon.errors import DEFECT, SurgeryError
from ckptsurgeon.files.pickles import opcodes
from ckptsurgeon.files.pickles.scan import Scan, scan
from ckptsurgeon.files.pickles.sharing import Cut, Memo, Splice, cut
from ckptsurgeon.files.pickles.values import NO_SCALAR, encode, like, scalar
from ckptsurgeon.plans.edits import Each, Key, Value, each_path
from ckptsurgeon.plans.frozen import frozen


@dataclass(slots=True)  # not frozen: that makes it three times slower to make
class Slot:
    """Where a holder keeps one value: `items[index]` of the opcode at `opcode`.

    `keyed`: the key is the value before it. `marked`: the first of the items is a mark."""

    opcode: int
    items: Sequence[int]
    index: int
    keyed: bool = False

    @property
    def value(self) -> int:
        return self.items[self.index]


@frozen
class Nth:
    """A step of a path: the value of the n-th pair of a dict, whatever its key is."""

    index: int


Path = tuple[Key | Nth, ...]
Steps = tuple[Key | Nth | Each, ...]


def splice(
    data: bytes,
    edits: Mapping[Path, Value] | Mapping[Steps, Value],
    *,
    delete: Sequence[tuple[Key, ...]] = (),
    rename: Mapping[tuple[Key, ...], str] | None = None,
    scanned: Scan | None = None,
) -> bytes:
    """`data` with the value under each path of `edits` set, each path of `delete` gone, and the
    last key of each path of `rename` another one in the same place. A step of a path of `edits` may
    be `Each` of several keys.

    Does what `tree[…][key] = value` and `del tree[…][key]` do: a path leads through shared
    containers, and a value that is shared itself stays as it is for its other holders. A last key
    that its dict lacks is inserted. A number or sequence keeps the type it has: an int set where a
    float is becomes a float, a list set where a tuple is becomes a tuple; a float set where an int
    is stays a float. At protocol 2 and 3 the result has no opcode that `weights_only=True` refuses
    if `data` has none (but for values that a removed cycle shares).

    Raises KeyError with the path if it leads nowhere, SurgeryError if edits overlap or a path goes
    into a tuple that others share, DamagedFile as `scan` does."""
    scanned = scanned or scan(data)
    program = _Program(scanned)
    cuts: list[Cut] = []
    numbers: list[Splice] = []
    for steps, value in edits.items():
        if (spans := program.numbers(steps)) is not None:
            firsts = {scanned.data[at]: at for at, _ in spans}  # one of each opcode
            news = {kind: encode(like(scanned, at, value)) for kind, at in firsts.items()}
            numbers += [Splice(at, end, news[scanned.data[at]]) for at, end in spans]
            continue
        for path in each_path(steps):
            holder, slot = program.find(path)
            if slot is None:
                cuts.append(program.insertion(holder, path, value))
            else:
                new = encode(like(scanned, slot.value, value))
                cuts.append(Cut((program.span(slot),), new))
    for path in delete:
        _, slot = program.find(path)
        if slot is None:
            raise KeyError(path)
        cuts.append(program.deletion(slot, path))
    for path, key in (rename or {}).items():
        holder, slot = program.find(path)
        _, taken = program.find((*path[:-1], key))
        if slot is None or not slot.keyed or taken is not None:
            raise KeyError(path)
        old = Slot(slot.opcode, slot.items, slot.index - 1)
        cuts.append(Cut((program.span(old),), encode(key)))
    _refuse_overlap(scanned, cuts, numbers)
    return replaced(scanned, [*cut(scanned, cuts), *numbers])


def _refuse_overlap(scanned: Scan, cuts: Sequence[Cut], numbers: Sequence[Splice]) -> None:
    """Numbers that are set twice, or in what else is cut; `cut` sees to the others."""
    starts = sorted(item.start for item in numbers)
    twice = [left for left, right in pairwise(starts) if left == right]
    for item in cuts:
        twice += starts[bisect_left(starts, item.start) : bisect_left(starts, item.end)]
    if twice:
        raise SurgeryError(f"{scanned.where}: two edits overlap at byte {twice[0]}", next=DEFECT)


class _Program:
    """The values of one scanned pickle, by path."""

    def __init__(self, scanned: Scan) -> None:
        self.scan = scanned
        self.data = scanned.data
        self.memo = Memo(scanned)
        self._items: dict[int, dict[Any, list[Slot]]] = {}
        self._holders: dict[Path, tuple[int, ...]] = {(): (self.scan.made(scanned.root),)}
        self._all: dict[int, list[Slot]] = {}

    def find(self, path: Path) -> tuple[int, Slot | None]:
        """The holder of the last key, and its slot; None where a dict lacks the key."""
        if not path:
            raise KeyError(path)
        holders = self._within(path[:-1])
        slot = self._slot(holders[-1], path[-1])
        if slot is None and self._dict_for(holders[-1]) is None:
            raise KeyError(path)
        self._refuse_shared(holders, path)
        return holders[-1], slot

    def numbers(self, steps: Steps) -> list[tuple[int, int]] | None:
        """The bytes of each number that `steps` lead to, the last but one of which is `Each`: one
        call of the native module. None where they are to be taken one by one."""
        if len(steps) < 2 or self.scan.native is None:
            return None
        each, last = steps[-2:]
        above = tuple(step for step in steps[:-2] if not isinstance(step, Each))
        if not isinstance(each, Each) or not isinstance(last, str) or len(above) < len(steps) - 2:
            return None
        found = self.scan.native.numbers(self._within(above)[-1], last)
        known = {key: (at, end) for key, at, end in found or ()}
        if not known or len(known) != len(found) or not known.keys() >= set(each.keys):
            return None
        return [known[key] for key in each.keys]

    def _within(self, path: Path) -> tuple[int, ...]:
        """The holders on the way, and the value under `path`; thousands of paths share theirs."""
        if path not in self._holders:
            above = self._within(path[:-1])
            slot = self._slot(above[-1], path[-1])
            if slot is None:
                raise KeyError(path)
            self._holders[path] = (*above, self.scan.made(slot.value))
        return self._holders[path]

    def span(self, slot: Slot) -> tuple[int, int]:
        """The bytes of the value in `slot`, with its PUT."""
        after = slot.index + 1
        end = self.scan.start(slot.items[after]) if after < len(slot.items) else slot.opcode
        while end in self.scan.gaps:
            end = self.scan.gaps[end]
        return self.scan.start(slot.value), end

    def insertion(self, holder: int, path: Path, value: Value) -> Cut:
        """A new last key of the dict that is, or is the state of, `holder`."""
        target = self._dict_for(holder)
        assert target is not None
        at = target + 1
        for opcode, _ in self.scan.grown.get(target, ()):
            at = max(at, opcode + 1)
        at += self.scan.put_size(at)
        return Cut(((at, at),), encode(path[-1]) + encode(value) + bytes([opcodes.SETITEM]))

    def deletion(self, slot: Slot, path: Path) -> Cut:
        """A dict key with its value, or an item of a list, gone."""
        if self.data[slot.opcode] in (*opcodes.TUPLES, *opcodes.OBJECTS):
            raise SurgeryError(
                f"{self.scan.where}: {path!r} is an item of a tuple", next="set the whole tuple"
            )
        spans = [self.span(slot)]
        if slot.keyed:
            key = Slot(slot.opcode, slot.items, slot.index - 1)
            spans.insert(0, self.span(key))
        alone = self.data[slot.opcode] in (opcodes.SETITEM, opcodes.APPEND)
        return Cut(tuple(spans), b"", slot.opcode if alone else None)

    # --- steps of a path -------------------------------------------------------------------------

    def _slot(self, holder: int, key: Key | Nth) -> Slot | None:
        """As `tree.get` steps: attributes before items, items of a dict before its own
        attributes."""
        opcode = self.data[holder]
        if isinstance(key, Nth):
            if holder not in self._all:
                self._all[holder] = list(self._pairs(holder))
            slots = self._all[holder]
            return slots[key.index] if key.index < len(slots) else None
        if opcode == opcodes.EMPTY_DICT:
            return self._item(holder, key)
        if opcode == opcodes.EMPTY_LIST:
            return self._appended(holder, key)
        if opcode in opcodes.TUPLES:
            parts = self.scan.parts.get(holder, [])
            return self._at(key, [(holder, parts, int(opcode == opcodes.TUPLE))])
        if opcode in opcodes.OBJECTS:
            steps = [self._attribute, self._item, self._appended]
            if self._is_ordered_dict(holder):
                steps = [self._item, self._attribute]
            for step in steps:
                if (slot := step(holder, key)) is not None:
                    return slot
        return None

    def _item(self, holder: int, key: Key) -> Slot | None:
        """The slot of a dict key. Of two that are equal the last one loads; that is refused."""
        if holder not in self._items:
            self._items[holder] = {}
            for slot in self._pairs(holder):
                own = scalar(self.scan, slot.items[slot.index - 1])
                if own is not NO_SCALAR:
                    self._items[holder].setdefault(own, []).append(slot)
        slots = self._items[holder].get(key, [])
        if len(slots) > 1:
            again = self.scan.start(slots[1].items[slots[1].index - 1])
            raise self.scan.damaged(again, f"the key {key!r} is twice in one dict")
        return slots[0] if slots else None

    def _pairs(self, holder: int) -> Iterator[Slot]:
        for opcode, items in self.scan.grown.get(holder, ()):
            if self.data[opcode] in opcodes.KEYED:
                for index in range(1 + (self.data[opcode] in opcodes.MARKED), len(items), 2):
                    yield Slot(opcode, items, index, keyed=True)

    def _appended(self, holder: int, key: Key) -> Slot | None:
        fillings = [
            (opcode, items, int(self.data[opcode] == opcodes.APPENDS))
            for opcode, items in self.scan.grown.get(holder, ())
            if self.data[opcode] in (opcodes.APPEND, opcodes.APPENDS)
        ]
        return self._at(key, fillings)

    def _attribute(self, holder: int, key: Key) -> Slot | None:
        for state in self._states(holder):
            if (slot := self._slot(state, key)) is not None:
                return slot
        return None

    def _states(self, holder: int) -> Iterator[int]:
        """What BUILD gives to `holder`, the last first; a pair is (`__dict__`, slots)."""
        for _, value in reversed(self.scan.built.get(holder, ())):
            state = self.scan.made(value)
            pair = self.scan.parts.get(state, ()) if self.data[state] == opcodes.TUPLE2 else ()
            halves = [self.scan.made(half) for half in pair]
            if halves and self.data[halves[1]] == opcodes.EMPTY_DICT:
                yield from reversed(halves)
            else:
                yield state

    @staticmethod
    def _at(key: Key, fillings: Sequence[tuple[int, Sequence[int], int]]) -> Slot | None:
        if isinstance(key, str):
            return None
        if key < 0:
            key += sum(len(items) - first for _, items, first in fillings)
        for opcode, items, first in fillings:
            if 0 <= key < len(items) - first:
                return Slot(opcode, items, first + key)
            key -= len(items) - first
        return None

    def _dict_for(self, holder: int) -> int | None:
        """Where a new key of `holder` goes: itself, or its attributes."""
        opcode = self.data[holder]
        if opcode == opcodes.EMPTY_DICT or self._is_ordered_dict(holder):
            return holder
        if opcode in opcodes.OBJECTS:
            dicts = (s for s in self._states(holder) if self.data[s] == opcodes.EMPTY_DICT)
            return next(dicts, None)
        return None

    def _is_ordered_dict(self, holder: int) -> bool:
        if self.data[holder] not in opcodes.OBJECTS:
            return False
        maker = self.scan.made(self.scan.parts[holder][0])
        name = b"ccollections\nOrderedDict\n"
        if self.data[maker] == opcodes.GLOBAL:
            return self.data.startswith(name, maker)
        names = [scalar(self.scan, part) for part in self.scan.parts[maker]]
        return names == ["collections", "OrderedDict"]

    def _refuse_shared(self, holders: Sequence[int], path: Path) -> None:
        """What plain Python would not change for others must not be changed for them here: tuples
        around the value, and the dict that an object has its attributes from."""
        for holder in reversed(holders):
            shared = [holder] if self.data[holder] in opcodes.TUPLES else []
            if self.data[holder] in opcodes.OBJECTS:
                shared = list(self._states(holder))
            for value in shared:
                index = self.scan.memo_index(value)
                if index is not None and self.memo.reads(index, 0, len(self.data)):
                    raise SurgeryError(
                        f"{self.scan.where}: {path!r} lies in a tuple, or in attributes, that "
                        "other values share",
                        next="set the whole tuple",
                    )
            if self.data[holder] not in opcodes.TUPLES:
                break


# --- bytes ---------------------------------------------------------------------------------------


def replaced(scanned: Scan, splices: Sequence[Splice]) -> bytes:
    """The bytes with `splices` done and the frame lengths of protocol 4 and 5 adjusted."""
    out: list[bytes] = []
    position = 0
    ordered = [*splices, *_frame_lengths(scanned, splices)]
    ordered.sort(key=itemgetter(0, 1))
    for start, end, new in ordered:
        out += (scanned.data[position:start], new)
        position = end
    out.append(scanned.data[position:])
    return b"".join(out)


def _frame_lengths(scanned: Scan, splices: Sequence[Splice]) -> Iterator[Splice]:
    """New lengths of the frames whose content changes. A frame whose header goes leaves its
    content unframed, which every unpickler reads."""
    for header, length in scanned.frames:
        start, end = header + 9, header + 9 + length
        grown = 0
        for item in splices:
            if item.start <= header < item.end:
                break
            if start <= item.start < end or item.start == item.end == end:
                grown += len(item.new) - (min(item.end, end) - item.start)
        else:
            if grown:
                yield Splice(header + 1, start, struct.pack("<Q", length + grown))
