"""The opcodes of pickle protocols 2 to 5, grouped by what they do to the stack.

Names and numbers are those of Python's `pickle` module. Opcodes that are not here (DUP, INST, EXT1,
PERSID, NEXT_BUFFER, …) are not written by these protocols for a file.
"""

from __future__ import annotations

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

PUTS = frozenset((BINPUT, LONG_BINPUT, MEMOIZE))
GETS = frozenset((BINGET, LONG_BINGET))
GLOBALS = frozenset((GLOBAL, STACK_GLOBAL))
TUPLES = frozenset((EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3))
TEXTS = frozenset((BINUNICODE, SHORT_BINUNICODE, BINUNICODE8))
LONGS = frozenset((LONG1, LONG4))
OBJECTS = frozenset((REDUCE, NEWOBJ, NEWOBJ_EX))

MARKED = frozenset((SETITEMS, APPENDS, ADDITEMS, TUPLE, FROZENSET))
"""They work on the values after the last mark."""
KEYED = frozenset((SETITEM, SETITEMS))
"""Their values are keys and what belongs to them."""

PUSH_SIZE = bytearray(256)
"""Bytes, with the argument, of an opcode that does nothing but push one value of a fixed size."""
for _opcode in (NONE, NEWTRUE, NEWFALSE, EMPTY_DICT, EMPTY_LIST, EMPTY_SET, EMPTY_TUPLE):
    PUSH_SIZE[_opcode] = 1
for _opcode, _size in ((BININT1, 2), (BININT2, 3), (BININT, 5), (BINFLOAT, 9)):
    PUSH_SIZE[_opcode] = _size

LENGTH_SIZE = {
    SHORT_BINUNICODE: 1, BINUNICODE: 4, BINUNICODE8: 8, SHORT_BINBYTES: 1, BINBYTES: 4,
    BINBYTES8: 8, BYTEARRAY8: 8, SHORT_BINSTRING: 1, BINSTRING: 4, LONG1: 1, LONG4: 4,
}  # fmt: skip
"""Bytes of the length that comes after the opcode and before its value."""

OPERANDS = {
    TUPLE1: 1, TUPLE2: 2, TUPLE3: 3, BINPERSID: 1, STACK_GLOBAL: 2, REDUCE: 2, NEWOBJ: 2,
    NEWOBJ_EX: 3,
}  # fmt: skip
"""Values that the opcode takes off the stack to push one made of them."""

HOLDERS = {
    SETITEMS: frozenset((EMPTY_DICT, *OBJECTS)),
    SETITEM: frozenset((EMPTY_DICT, *OBJECTS)),
    APPENDS: frozenset((EMPTY_LIST, *OBJECTS)),
    APPEND: frozenset((EMPTY_LIST, *OBJECTS)),
    ADDITEMS: frozenset((EMPTY_SET, *OBJECTS)),
    BUILD: OBJECTS,
}
"""What the opcode fills: values made by one of these, below its own on the stack."""
