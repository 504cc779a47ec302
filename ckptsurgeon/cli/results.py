"""What a job of a pass gives, as JSON for another process, and back: nothing is unpickled.

It is made of dataclasses, lists, dicts by name, numbers, texts and None, as the function's own
annotations say. A thing that the job was given is named by its place among those, since the other
process has been given it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def packed(result: Any, given: Any) -> Any:
    """What JSON can hold of a result of a job."""
    places = {id(each): place for place, each in enumerate(_each(given))}

    def pack(value: Any) -> Any:
        if id(value) in places:
            return places[id(value)]
        if is_dataclass(value):
            return {each.name: pack(getattr(value, each.name)) for each in fields(value)}
        if isinstance(value, dict):
            return {name: pack(each) for name, each in value.items()}
        return [pack(each) for each in value] if isinstance(value, (list, tuple)) else value

    return pack(result)


def unpacked(function: Callable[..., Any], data: Any, given: Any) -> Any:
    """The result of `function` whose `packed` this is. Raises TypeError, KeyError, IndexError or
    ValueError for what was not packed here."""
    whole = function.func if isinstance(function, partial) else function
    return _unpacked(get_type_hints(whole)["return"], data, _each(given))


def _each(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list) else [given]


def _unpacked(hint: Any, data: Any, given: Sequence[Any]) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if data is None:
        return None
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each is not NoneType]
        return _unpacked(kinds[0], data, given) if len(kinds) == 1 else data
    if origin in (list, tuple):
        return origin(_unpacked(inner[0], each, given) for each in data)
    if origin is dict:
        return {name: _unpacked(inner[1], each, given) for name, each in data.items()}
    if not (isinstance(hint, type) and is_dataclass(hint)):
        return data
    if isinstance(data, int):
        return given[data]
    hints = get_type_hints(hint)
    return hint(**{name: _unpacked(hints[name], each, given) for name, each in data.items()})
