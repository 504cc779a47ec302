"""Whether the values in one of our own records are of the types that its class declares.

A record is JSON that lies in a run, where others can write: its fields may hold anything.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Check = Callable[[Any], bool]
Kinds = dict[type, Check | None]

NUMBERS = 1 << 63
"""Sizes, times and positions are below it, as the kernel's are."""
WIDE = ("dev", "ino", "seed")
"""Fields that use all 64 bits, and are only compared."""


def made(kind: Callable[..., T], values: Mapping[str, Any]) -> T:
    """The record of the class `kind` with these values. Raises TypeError where one is missing, is
    unknown or has another type than the class declares."""
    fields = _fields(kind)
    for name, value in values.items():
        if name in fields and not _fits(fields[name], value):
            raise TypeError(f"{kind.__name__}.{name} is {_shown(value)}")
    return kind(**values)


def _shown(value: Any) -> str:
    """What it is, shortly: the value may be as long as the record."""
    return repr(value)[:40] if isinstance(value, (bool, int, float, str)) else type(value).__name__


def _fits(kinds: Kinds, value: Any) -> bool:
    check = kinds.get(type(value), _no)
    return check is None or check(value)


@functools.cache
def _fields(kind: Any) -> dict[str, Kinds]:
    hints = get_type_hints(kind).items()
    wide: Kinds = {int: None, type(None): None}
    return {name: wide if name in WIDE else _kinds(hint) for name, hint in hints}


def _kinds(hint: Any) -> Kinds:
    """Of each type that a value may have, what else must be true of it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds: Kinds = {}
        for one in map(_kinds, inner):
            both = {kind: _either(kinds[kind], one[kind]) for kind in kinds.keys() & one.keys()}
            kinds |= one | both
        return kinds
    if origin is tuple:
        return {tuple: _tuple(inner)}
    if origin is list:
        return {tuple: None, dict: None}  # JSON has one kind of lists
    if origin is not None and issubclass(origin, Mapping):
        if inner[1] is Any:
            return {dict: None}
        each = _kinds(inner[1])
        return {dict: lambda value: all(_fits(each, item) for item in value.values())}
    if hint is int:
        return {int: _is_number}
    if hint is float:
        return {int: None, float: None}
    if hint is str:
        return {str: _is_text}
    assert hint in (bool, bytes, type(None)) or is_dataclass(hint), hint
    return {hint: None}


def _either(one: Check | None, other: Check | None) -> Check | None:
    if one is None or other is None:
        return None
    return lambda value: one(value) or other(value)


def _tuple(hints: tuple[Any, ...]) -> Check | None:
    """Of one kind at any length, or of a fixed one."""
    if hints == (Any, ...):
        return None
    if hints[1:] == (...,):
        each = _kinds(hints[0])
        return lambda value: all(_fits(each, item) for item in value)
    row = [_kinds(hint) for hint in hints]
    return lambda value: len(value) == len(row) and all(map(_fits, row, value))


def _no(value: Any) -> bool:
    return False


def _is_number(value: int) -> bool:
    return -NUMBERS <= value < NUMBERS


def _is_text(value: str) -> bool:
    """What can be a name of a file: no zero byte, and no half of a surrogate pair but those that
    stand for bytes which are no UTF-8."""
    if not value.isascii():
        try:
            os.fsencode(value)
        except UnicodeEncodeError:
            return False
    return "\0" not in value
