"""One pass over the opcodes of a pickle: proves it safe to read, and says where each value stands.

Nothing is decoded but lengths and memo indices, nothing is imported, nothing is called. A value is
known by the offset of the opcode that makes it. The native module `_shards` does the work where it
was built, by the same rules; what it refuses is always judged here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import repeat

from ckptsurgeon.errors import count
from ckptsurgeon.files import native
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.pickles import opcodes
from ckptsurgeon.files.pickles.opcodes import (
    BINGET,
    BINPUT,
    GETS,
    HOLDERS,
    LENGTH_SIZE,
    LONG_BINPUT,
    LONGS,
    MARK,
    MARKED,
    OPERANDS,
    PUSH_SIZE,
    PUTS,
    STOP,
)
from ckptsurgeon.files.pickles.places import CutShort, LazyDict, Scan

__all__ = ["CutShort", "Scan", "scan"]

MAX_BYTES = 256 << 20
"""Bytes of the longest pickle, so of the longest string in it."""
MAX_OPCODES = 2_000_000
"""Opcodes of any pickle up to 4 MB; a longer one may have four for every nine bytes. Those of
torch have four for every ten: 10,000 small tensors are 750 kB and 300,000 opcodes."""
MAX_MEMO = 1 << 22
"""A memo index below this is allowed anywhere: values that were cut out leave gaps before it."""
MAX_DEPTH = 1000
"""Levels of nesting, leaving out what a cycle repeats."""
MAX_INTEGER = 4096
"""Bytes of the longest integer."""
MAX_NAME = 4096
"""Bytes of the longest module or class name."""
MAX_KEY = 1000
"""Values in the largest tuple that is a dict key or a set item, each reference counted again."""
MAX_LONG_KEYS = 1000
"""Dict keys and set items that are integers of 8 bytes or more: any number of them can be made to
collide, which costs time by its square."""


def scan(
    data: bytes, *, where: str = "", base: int = 0, whole: bool = False, dense: bool = False
) -> Scan:
    """Walk `data` from PROTO to STOP. `base` is the offset of `data` in the file `where`.

    Guarantees, for what the C unpickler then does with the same bytes: protocol 2 to 5; at most
    MAX_BYTES and MAX_DEPTH, and as many opcodes as `_most` says; each length lies inside the data;
    a memo index is below the number of bytes before it, or below 2^22; only named globals are
    called or instantiated, and only on the spot; only containers that are still being built are
    filled; a dict key or set item costs at most MAX_KEY steps to hash, and few of them can be made
    to collide. So its memory is bounded by a constant times len(data), plus 64 MiB. With `whole`
    the scan is done here, so that its dicts hold all that they can be asked for; a `dense` pickle
    may have two opcodes for every three bytes, and takes as much more memory.
    Raises DamagedFile with the offset of the opcode that breaks a rule."""
    out = Scan(data, where, base, dense=dense)
    if len(data) > MAX_BYTES:
        raise out.damaged(0, f"the pickle has {count(len(data), 'byte')}, more than {MAX_BYTES}")
    if len(data) < 2:
        raise out.cut_short(0, "the pickle is cut short" if data else "it is empty")
    if data[0] != opcodes.PROTO or not 2 <= data[1] <= 5:
        raise out.damaged(0, "no pickle of protocol 2 to 5 starts here")
    out.protocol = data[1]
    if native.shards is not None and not whole and _scan_natively(out):
        return out
    with collector_paused():
        _walk(out)
    return out


def _most(out: Scan) -> int:
    """How many opcodes the pickle may have."""
    return max(MAX_OPCODES, len(out.data) * 2 // 3 if out.dense else len(out.data) * 4 // 9)


def _scan_natively(out: Scan) -> bool:
    """Have the native module scan; False if it refuses."""
    places = native.shards.scan(
        out.data,
        opcodes=_most(out),
        depth=MAX_DEPTH,
        integer=MAX_INTEGER,
        name=MAX_NAME,
        key=MAX_KEY,
        long_keys=MAX_LONG_KEYS,
    )
    if places is None:
        return False
    out.native, out.root, out.stop = places, places.root, places.stop
    out.parts, out.grown, out.built = (
        LazyDict(places.parts),
        LazyDict(places.grown),
        LazyDict(places.built),
    )
    out.memo, out.alias = LazyDict(places.memo), LazyDict(places.alias)
    out.puts, out.gets = places.puts(), places.gets()
    out.frames, out.gaps = places.frames(), places.gaps()
    return True


def _walk(out: Scan) -> None:
    data, parts, memo, alias = out.data, out.parts, out.memo, out.alias
    puts: list[int] = []
    push_size, length_size, operands = PUSH_SIZE, LENGTH_SIZE, OPERANDS
    u32 = struct.Struct("<I").unpack_from
    stack: list[int] = []
    marks: list[int] = []  # where on the stack the open marks are
    height: dict[int, int] = {}  # levels below a value that has any
    push = stack.append
    i = 2
    try:
        for _ in repeat(None, _most(out)):
            op = data[i]
            if size := push_size[op]:
                push(i)
                i += size
            elif op in PUTS:
                if op == BINPUT:
                    index, size = data[i + 1], 2
                elif op == LONG_BINPUT:
                    (index,), size = u32(data, i + 1), 5
                else:
                    index, size = len(memo), 1
                if (index >= i and index >= MAX_MEMO) or index in memo:
                    raise out.damaged(i, f"memo index {index} is set twice or out of range")
                memo[index] = stack[-1]
                puts.append(i)
                i += size
            elif op in GETS:
                if op == BINGET:
                    index, size = data[i + 1], 2
                else:
                    (index,), size = u32(data, i + 1), 5
                if index not in memo:
                    raise out.damaged(i, f"memo index {index} is not set")
                alias[i] = value = memo[index]
                if value in height:
                    height[i] = height[value]
                push(i)
                i += size
            elif op == MARK:
                marks.append(len(stack))
                if len(marks) > MAX_DEPTH:
                    raise out.damaged(i, f"more than {MAX_DEPTH} marks are open")
                push(i)
                i += 1
            elif size := length_size.get(op, 0):
                length = int.from_bytes(data[i + 1 : i + 1 + size], "little")
                if i + 1 + size + length > len(data):
                    raise out.cut_short(
                        i, f"a value of {count(length, 'byte')} does not fit in the pickle"
                    )
                if op in LONGS and length > MAX_INTEGER:
                    raise out.damaged(i, f"an integer has {count(length, 'byte')}")
                if op in LONGS and length >= 8:
                    height[i] = 0  # not a level, but to be looked at if it is a key
                push(i)
                i += 1 + size + length
            elif op in operands or op in MARKED or op in HOLDERS:
                items = _operands(out, i, op, stack, marks)
                levels = 1
                for item in items:
                    if item in height and height[item] >= levels:
                        levels = height[item] + 1
                if levels > MAX_DEPTH:
                    raise out.damaged(i, f"values are nested more than {MAX_DEPTH} levels deep")
                if op in HOLDERS:
                    _fill(out, i, op, items, stack[-1], height)
                    if levels > height.get(stack[-1], 0):
                        height[stack[-1]] = levels
                else:
                    _check(out, i, op, items, height)
                    parts[i] = items
                    height[i] = levels
                    push(i)
                i += 1
            elif op == STOP:
                break
            else:
                i = _rare(out, i, op, stack, marks)
        else:
            raise out.damaged(i, f"the pickle has more than {count(_most(out), 'opcode')}")
    except struct.error:
        raise out.cut_short(i, "the pickle is cut short") from None
    except IndexError:
        if i + 1 >= len(data):
            raise out.cut_short(len(data), "the pickle is cut short") from None
        raise out.damaged(i, "an opcode lacks its values on the stack") from None
    if len(stack) != 1 or marks:
        raise out.damaged(i, f"the stack is left with {count(len(stack), 'value')}, not one")
    out.puts, out.gets = puts, list(alias)
    out.root = stack[0]
    out.stop = i + 1


def _operands(out: Scan, i: int, op: int, stack: list[int], marks: list[int]) -> list[int]:
    """Take the values of the opcode off the stack; with the mark, if it works up to one."""
    if op in opcodes.MARKED:
        first = marks.pop()
    else:
        first = len(stack) - (opcodes.OPERANDS.get(op) or (2 if op == opcodes.SETITEM else 1))
    items = stack[first:]
    del stack[first:]
    floor = marks[-1] + 1 if marks else 0
    if first < floor + (op in opcodes.HOLDERS):
        raise out.damaged(i, "an opcode lacks its values on the stack")
    return items


def _fill(
    out: Scan, i: int, op: int, items: list[int], target: int, height: dict[int, int]
) -> None:
    if out.data[target] not in opcodes.HOLDERS[op]:
        raise out.damaged(i, "a value is put into what can't hold it")
    if op in opcodes.KEYED or op == opcodes.ADDITEMS:
        if op in opcodes.MARKED and op in opcodes.KEYED and not len(items) % 2:
            raise out.damaged(i, "a dict key has no value")
        keys = items if op == opcodes.ADDITEMS else items[op in opcodes.MARKED :: 2]
        if not height.keys().isdisjoint(keys):
            _check_keys(out, keys)
    if op in opcodes.HOLDERS and opcodes.HOLDERS[op] is opcodes.OBJECTS:
        out.built.setdefault(target, []).append((i, items[0]))
    else:
        out.grown.setdefault(target, []).append((i, items))


def _check(out: Scan, i: int, op: int, items: list[int], height: dict[int, int]) -> None:
    """Called and instantiated are named globals only (the legacy format has them in persistent
    ids, with their source); a global's name is made of two strings."""
    if op in opcodes.OBJECTS:
        if out.data[out.alias.get(items[0], items[0])] not in (*opcodes.GLOBALS, opcodes.BINPERSID):
            raise out.damaged(i, "the pickle calls something that is not a named global")
    elif op == opcodes.STACK_GLOBAL:
        if any(out.data[out.alias.get(item, item)] not in opcodes.TEXTS for item in items):
            raise out.damaged(i, "the name of a global is not a string")
    elif op == opcodes.FROZENSET:
        _check_keys(out, items)


def _check_keys(out: Scan, keys: Sequence[int]) -> None:
    """Hashing visits a shared tuple once for each reference: the steps are counted first."""
    for key in keys:
        steps, todo = 0, [key]
        while todo:
            value = todo.pop()
            value = out.alias.get(value, value)
            steps += 1
            out.long_keys += out.data[value] in LONGS
            if out.data[value] in opcodes.TUPLES or out.data[value] == opcodes.FROZENSET:
                todo += out.parts.get(value, ())
            if steps > MAX_KEY:
                raise out.damaged(key, f"a dict key has more than {MAX_KEY} parts")
        if out.long_keys > MAX_LONG_KEYS:
            raise out.damaged(key, f"more than {MAX_LONG_KEYS} dict keys are long integers")


def _rare(out: Scan, i: int, op: int, stack: list[int], marks: list[int]) -> int:
    """GLOBAL, FRAME, POP and POP_MARK; the offset after it."""
    data = out.data
    if op == opcodes.GLOBAL:
        stack.append(i)
        for _ in range(2):
            line = data.find(b"\n", i + 1, i + 2 + MAX_NAME)
            if line < 0:
                error = out.cut_short if len(data) < i + 2 + MAX_NAME else out.damaged
                raise error(i, f"the name of a global has no end, or over {MAX_NAME} bytes")
            i = line
        return i + 1
    if op == opcodes.FRAME:
        length = int.from_bytes(data[i + 1 : i + 9], "little")
        if i + 9 + length > len(data):
            raise out.cut_short(i, f"a frame of {count(length, 'byte')} does not fit in the pickle")
        out.frames.append((i, length))
        out.gaps[i + 9] = i
        return i + 9
    if op not in (opcodes.POP, opcodes.POP_MARK):
        raise out.damaged(i, f"opcode {op:#04x} is not written by protocols 2 to 5")
    if op == opcodes.POP and len(stack) > (marks[-1] + 1 if marks else 0):
        popped = out.start(stack.pop())
    else:
        mark = marks.pop()
        popped = stack[mark]
        del stack[mark:]
    out.gaps[i + 1] = popped
    return i + 1
