"""One pass over the opcodes of a pickle: proves it safe to read, and says where each value stands.

Nothing is decoded but lengths and memo indices, nothing is imported, nothing is called. A value is
known by the offset of the opcode that makes it.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

from ckptsurgeon.errors import DamagedFile

MAX_BYTES = 256 << 20
"""Bytes of the longest pickle, so of the longest string in it."""
MAX_OPCODES = 4_000_000
"""Opcodes of the longest pickle: a shard of 10,000 tensors has 300,000."""
MAX_DEPTH = 1000
"""Levels of nesting, leaving out what a cycle repeats."""
MAX_INTEGER = 4096
"""Bytes of the longest integer."""
MAX_NAME = 4096
"""Bytes of the longest module or class name."""
MAX_KEY = 1000
"""Values in the largest tuple that is a dict key or a set item, each reference counted again."""

# Opcodes by what they do. The ones missing here are not written by protocols 2 to 5.
PROTO, STOP, FRAME = 0x80, 0x2E, 0x95
MARK, POP, POP_MARK = 0x28, 0x30, 0x31
BINPUT, LONG_BINPUT, MEMOIZE = 0x71, 0x72, 0x94
BINGET, LONG_BINGET = 0x68, 0x6A
GLOBAL, STACK_GLOBAL = 0x63, 0x93
EMPTY_DICT, EMPTY_LIST, EMPTY_SET, EMPTY_TUPLE = 0x7D, 0x5D, 0x8F, 0x29
TUPLE, TUPLE1, TUPLE2, TUPLE3, FROZENSET = 0x74, 0x85, 0x86, 0x87, 0x91
SETITEM, SETITEMS, APPEND, APPENDS, ADDITEMS = 0x73, 0x75, 0x61, 0x65, 0x90
REDUCE, NEWOBJ, NEWOBJ_EX, BUILD, BINPERSID = 0x52, 0x81, 0x92, 0x62, 0x51
NONE, NEWTRUE, NEWFALSE = 0x4E, 0x88, 0x89
BININT, BININT1, BININT2, LONG1, LONG4, BINFLOAT = 0x4A, 0x4B, 0x4D, 0x8A, 0x8B, 0x47
BINUNICODE, SHORT_BINUNICODE, BINUNICODE8 = 0x58, 0x8C, 0x8D
BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8 = 0x42, 0x43, 0x8E, 0x96
BINSTRING, SHORT_BINSTRING = 0x54, 0x55

TUPLES = frozenset((EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3))
TEXTS = frozenset((BINUNICODE, SHORT_BINUNICODE, BINUNICODE8))
OBJECTS = frozenset((REDUCE, NEWOBJ, NEWOBJ_EX))

# Bytes of an opcode that does nothing but push one value, with its argument.
_PUSH = bytearray(256)
for _opcode in (NONE, NEWTRUE, NEWFALSE, EMPTY_DICT, EMPTY_LIST, EMPTY_SET, EMPTY_TUPLE):
    _PUSH[_opcode] = 1
for _opcode, _size in ((BININT1, 2), (BININT2, 3), (BININT, 5), (BINFLOAT, 9)):
    _PUSH[_opcode] = _size

# Opcodes that push as many bytes as the length after them says: width of that length.
_COUNTED = {
    SHORT_BINUNICODE: 1, BINUNICODE: 4, BINUNICODE8: 8, SHORT_BINBYTES: 1, BINBYTES: 4,
    BINBYTES8: 8, BYTEARRAY8: 8, SHORT_BINSTRING: 1, BINSTRING: 4, LONG1: 1, LONG4: 4,
}  # fmt: skip
_INTEGERS = frozenset((LONG1, LONG4))

_PARTS = {TUPLE1: 1, TUPLE2: 2, TUPLE3: 3, BINPERSID: 1, REDUCE: 2, NEWOBJ: 2, NEWOBJ_EX: 3}
_PARTS[STACK_GLOBAL] = 2

_HOLDERS = {
    SETITEMS: frozenset((EMPTY_DICT, *OBJECTS)),
    SETITEM: frozenset((EMPTY_DICT, *OBJECTS)),
    APPENDS: frozenset((EMPTY_LIST, *OBJECTS)),
    APPEND: frozenset((EMPTY_LIST, *OBJECTS)),
    ADDITEMS: frozenset((EMPTY_SET, *OBJECTS)),
    BUILD: OBJECTS,
}


class CutShort(DamagedFile):
    """The pickle, or a value in it, ends after the last byte there is."""


@dataclass
class Scan:
    """Where the values of one pickle stand.

    `parts` of a tuple, object, or persistent id are the values it is made of (after the mark, when
    there is one); `grown` of a container are the (opcode offset, values) that fill it, where the
    values of SETITEMS, APPENDS and ADDITEMS come after their mark; `built` of an object are the
    (opcode offset, state). `alias` leads from each GET to the value it stands for. `gaps` leads
    from the end of bytes that belong to no value (a FRAME, popped values) to their start."""

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
    puts: list[int] = field(default_factory=list)
    alias: dict[int, int] = field(default_factory=dict)
    frames: list[tuple[int, int]] = field(default_factory=list)
    gaps: dict[int, int] = field(default_factory=dict)

    def start(self, value: int) -> int:
        """First byte of `value`."""
        while (parts := self.parts.get(value)) is not None:
            value = parts[0]
        return value

    def made(self, value: int) -> int:
        """The value that `value` stands for, if it is a GET."""
        return self.alias.get(value, value)

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


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: it would visit a million small lists again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def scan(data: bytes, *, where: str = "", base: int = 0) -> Scan:
    """Walk `data` from PROTO to STOP. `base` is the offset of `data` in the file `where`.

    Guarantees, for what the C unpickler then does with the same bytes: protocol 2 to 5; at most
    MAX_BYTES, MAX_OPCODES and MAX_DEPTH; each length lies inside the data; a memo index is below
    the number of opcodes and set once; only named globals are called or instantiated, and only on
    the spot; only containers that are still being built are filled; a dict key or set item costs
    at most MAX_KEY steps to hash. So its memory is bounded by a constant times len(data).
    Raises DamagedFile with the offset of the opcode that breaks a rule."""
    out = Scan(data, where, base)
    if len(data) > MAX_BYTES:
        raise out.damaged(0, f"the pickle has {len(data)} bytes, more than {MAX_BYTES}")
    if len(data) < 2:
        raise out.cut_short(0, "the pickle is cut short")
    if data[0] != PROTO or not 2 <= data[1] <= 5:
        raise out.damaged(0, "no pickle of protocol 2 to 5 starts here")
    out.protocol = data[1]
    with collector_paused():
        _walk(out)
    return out


def _walk(out: Scan) -> None:
    data, parts, memo, alias = out.data, out.parts, out.memo, out.alias
    grown, built, puts = out.grown, out.built, out.puts
    u32 = struct.Struct("<I").unpack_from
    push_size, counted, part_count, holders = _PUSH, _COUNTED, _PARTS, _HOLDERS
    stack: list[int] = []
    marks: list[int] = []
    height: dict[int, int] = {}  # levels below a value that has any
    tall = height.get
    push, pop, put = stack.append, stack.pop, puts.append
    floor = 0  # values below it belong to an open mark
    i = 2
    try:
        for _ in repeat(None, MAX_OPCODES):
            op = data[i]
            if size := push_size[op]:
                push(i)
                i += size
            elif op in (BINPUT, LONG_BINPUT, MEMOIZE):
                if op == BINPUT:
                    index, size = data[i + 1], 2
                elif op == LONG_BINPUT:
                    (index,), size = u32(data, i + 1), 5
                else:
                    index, size = len(memo), 1
                if index >= i or index in memo:
                    raise out.damaged(i, f"memo index {index} is set twice or out of range")
                memo[index] = stack[-1]
                put(i)
                i += size
            elif op in (BINGET, LONG_BINGET):
                if op == BINGET:
                    value, size = memo[data[i + 1]], 2
                else:
                    value, size = memo[u32(data, i + 1)[0]], 5
                alias[i] = value
                if levels := tall(value):
                    height[i] = levels
                push(i)
                i += size
            elif op == MARK:
                marks.append(len(stack))
                push(i)
                i += 1
                floor = len(stack)
            elif size := part_count.get(op, 0):
                if len(stack) - floor < size:
                    raise out.damaged(i, "an opcode lacks its values on the stack")
                items = stack[-size:]
                del stack[-size:]
                _check_call(out, i, op, items)
                levels = 1 + max([tall(item, 0) for item in items])
                if levels > MAX_DEPTH:
                    raise out.damaged(i, f"values are nested more than {MAX_DEPTH} levels deep")
                parts[i] = items
                height[i] = levels
                push(i)
                i += 1
            elif size := counted.get(op, 0):
                length = int.from_bytes(data[i + 1 : i + 1 + size], "little")
                if i + 1 + size + length > len(data):
                    raise out.cut_short(i, f"a value of {length} bytes does not fit in the pickle")
                if op in _INTEGERS and length > MAX_INTEGER:
                    raise out.damaged(i, f"an integer has {length} bytes")
                push(i)
                i += 1 + size + length
            elif op in (TUPLE, FROZENSET):
                mark = marks.pop()
                items = stack[mark:]
                del stack[mark:]
                floor = marks[-1] + 1 if marks else 0
                if op == FROZENSET:
                    _check_keys(out, height, items)
                levels = 1 + max([tall(item, 0) for item in items])
                if levels > MAX_DEPTH:
                    raise out.damaged(i, f"values are nested more than {MAX_DEPTH} levels deep")
                parts[i] = items
                height[i] = levels
                push(i)
                i += 1
            elif op in holders:
                if op in (SETITEMS, APPENDS, ADDITEMS):
                    mark = marks.pop()
                    items = stack[mark:]
                    del stack[mark:]
                    floor = marks[-1] + 1 if marks else 0
                else:
                    size = 2 if op == SETITEM else 1
                    if len(stack) - floor < size:
                        raise out.damaged(i, "an opcode lacks its values on the stack")
                    items = stack[-size:]
                    del stack[-size:]
                if len(stack) == floor:
                    raise out.damaged(i, "an opcode lacks its values on the stack")
                target = stack[-1]
                if data[target] not in holders[op]:
                    raise out.damaged(i, "a value is put into what can't hold it")
                if op in (SETITEMS, SETITEM, ADDITEMS):
                    if op == SETITEMS and not len(items) % 2:
                        raise out.damaged(i, "a dict key has no value")
                    keys = items if op == ADDITEMS else items[op == SETITEMS :: 2]
                    if not height.keys().isdisjoint(keys):
                        _check_keys(out, height, keys)
                levels = 1 + max([tall(item, 0) for item in items])
                if levels > MAX_DEPTH:
                    raise out.damaged(i, f"values are nested more than {MAX_DEPTH} levels deep")
                if levels > tall(target, 0):
                    height[target] = levels
                if op == BUILD:
                    built.setdefault(target, []).append((i, items[0]))
                else:
                    grown.setdefault(target, []).append((i, items))
                i += 1
            elif op == GLOBAL:
                push(i)
                middle = data.index(b"\n", i + 1, i + 2 + MAX_NAME)
                i = data.index(b"\n", middle + 1, middle + 2 + MAX_NAME) + 1
            elif op == FRAME:
                length = int.from_bytes(data[i + 1 : i + 9], "little")
                if i + 9 + length > len(data):
                    raise out.cut_short(i, f"a frame of {length} bytes does not fit in the pickle")
                out.frames.append((i, length))
                out.gaps[i + 9] = i
                i += 9
            elif op in (POP, POP_MARK):
                if op == POP and len(stack) > floor:
                    popped = out.start(pop())
                else:
                    mark = marks.pop()
                    popped = stack[mark]
                    del stack[mark:]
                    floor = marks[-1] + 1 if marks else 0
                i += 1
                out.gaps[i] = popped
            elif op == STOP:
                break
            else:
                raise out.damaged(i, f"opcode {op:#04x} is not written by protocols 2 to 5")
        else:
            raise out.damaged(i, f"the pickle has more than {MAX_OPCODES} opcodes")
    except (IndexError, struct.error):
        if i >= len(data):
            raise out.cut_short(len(data), "the pickle is cut short") from None
        raise out.damaged(i, "an opcode lacks its values on the stack") from None
    except KeyError:
        raise out.damaged(i, "a memo index is read that was not set") from None
    except ValueError:
        cut = len(data) - i < 2 * MAX_NAME
        error = out.cut_short if cut else out.damaged
        raise error(i, "a global has no end or a name that is too long") from None
    if len(stack) != 1 or marks:
        raise out.damaged(i, f"{len(stack)} values are left on the stack, not one")
    out.root = stack[0]
    out.stop = i + 1


def _check_call(out: Scan, offset: int, opcode: int, items: list[int]) -> None:
    """Called and instantiated are named globals only; a global's name is made of two strings."""
    data = out.data
    if opcode in (REDUCE, NEWOBJ, NEWOBJ_EX):
        if data[out.alias.get(items[0], items[0])] not in (GLOBAL, STACK_GLOBAL):
            raise out.damaged(offset, "the pickle calls something that is not a named global")
    elif opcode == STACK_GLOBAL and any(data[out.made(item)] not in TEXTS for item in items):
        raise out.damaged(offset, "the name of a global is not a string")


def _check_keys(out: Scan, height: dict[int, int], keys: list[int]) -> None:
    """Hashing visits a shared tuple once for each reference: the steps are counted first."""
    for key in keys:
        steps, todo = 0, [key]
        while todo:
            value = out.made(todo.pop())
            steps += 1
            if out.data[value] in TUPLES or out.data[value] == FROZENSET:
                todo += out.parts.get(value, ())
            if steps > MAX_KEY:
                raise out.damaged(key, f"a dict key has more than {MAX_KEY} parts")
