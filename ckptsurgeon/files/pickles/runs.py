"""Recognises whole tensors, and dicts of tensors, in the opcodes of a large pickle.

A shard of 10,000 tensors has 300,000 opcodes, nearly all of them in the one sequence that
`torch.save` writes for a tensor at protocol 2 or 3. A regular expression steps over it a hundred
times faster than a loop. An opcode is told by its first byte and so are its length and arguments,
hence what matches is that sequence of opcodes and no other reading of the bytes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from ckptsurgeon.files.pickles.opcodes import BINGET, EMPTY_DICT, LONG_BINGET

Match = Callable[[bytes, int], "re.Match[bytes] | None"]

_GET = rb"(?:h.|j.{4})"
# Memo indices from 256 to 2^22 only: a run never redefines one that BINPUT sets.
_PUT = rb"r(?:.[^\x00]\x00\x00|..[\x01-\x3f]\x00)"
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x04.{4}|\x05.{5}|\x06.{6}))"
_STORAGE_KEY = (  # torch counts storages
    rb"X(?:" + b"|".join(rb"\x%02x\x00\x00\x00.{%d}" % (n, n) for n in range(1, 9)) + rb")"
)
_ENDS = (rb"\x85", rb"\x86", rb"\x87")
_SIZE = (
    rb"(?:\)|" + b"|".join(_INT * (n + 1) + end + _PUT for n, end in enumerate(_ENDS)) + rb"|\("
    rb"(?:" + _INT + rb"){4,8}t" + _PUT + rb")"
)  # fmt: skip
_STORAGE = rb"\(" + _GET + _GET + _STORAGE_KEY + _PUT + _GET + _INT + rb"t" + _PUT + rb"Q"
_HOOKS = _GET + rb"\)R" + _PUT
_TENSOR = (
    _GET + rb"\(" + _STORAGE + _INT + _SIZE + _SIZE + rb"[\x88\x89]" + _HOOKS
    + rb"t" + _PUT + rb"R" + _PUT
)  # fmt: skip
# Keys: integers, and strings by BINGET, so of an index below 256. A string in place may be read
# again as a key of the next dicts: the scan must have seen it.
_KEY = rb"(?:h.|" + _INT + rb")"
_VALUE = rb"(?:" + _TENSOR + rb"|" + _GET + rb"|" + _INT + rb"|G.{8}|[N\x88\x89])"
_DICT = rb"\}" + _PUT + rb"\((?:" + _KEY + _VALUE + rb")+u"

LEVELS = 8
"""Levels of nesting in a run, at most."""


@functools.cache
def matches() -> dict[int, Match]:
    """By its first opcode, what matches a run: a tensor that is rebuilt by a global from the memo,
    or a dict whose values are such tensors, numbers, or from the memo."""
    tensor = re.compile(_TENSOR, re.DOTALL).match
    tensor_dict = re.compile(_DICT, re.DOTALL).match
    return {BINGET: tensor, LONG_BINGET: tensor, EMPTY_DICT: tensor_dict}
