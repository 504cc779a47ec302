"""A pickle's tree as its leaves by path: plain values, lists of them, and tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.pickles.tree import Object, Tensor
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

MOST = 2_000_000
"""Leaves of one file. A pickle can name one list in many places."""
RANDOM = re.compile(r"(^|[_.])(rng|random)([_.]|$)|^(random|rng)_states?_?\d*$", re.IGNORECASE)
"""Keys and file names under which generators of random numbers are kept."""

Path = tuple[Key, ...]
Leaves = dict[Path, Any]


def leaves(tree: Any, archive: Archive) -> Leaves:
    """Each leaf by its path: the keys of dicts, the indices of lists, the names of attributes. A
    tensor of one element is its number; a list of plain values is one leaf. Of random numbers only
    that they are there. Raises SurgeryError for a tree of more than MOST leaves."""
    out: Leaves = {}
    try:
        for path, value in _walk((), tree, ()):
            if isinstance(value, Tensor) and value.numel == 1:
                value = archive.value(value)
            out[path] = value
            if len(out) > MOST:
                raise SurgeryError(
                    f"{archive.where}: it has more than {MOST:,} values",
                    next=command("show", why="what of it can be edited"),
                )
    except RecursionError:
        raise SurgeryError(
            f"{archive.where}: its values are nested too deep", next=command("verify")
        ) from None
    return out


def _walk(path: Path, value: Any, above: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
    if path and isinstance(path[-1], str) and RANDOM.search(path[-1]):
        yield path, PRESENT
    elif isinstance(value, Tensor) or not isinstance(value, (dict, list, tuple, Object)):
        yield path, _plain(value)
    elif isinstance(value, (list, tuple)) and (flat := _flat(value)) is not None:
        yield path, flat
    elif id(value) not in above:
        for key, item in _inside(value):
            yield from _walk((*path, key), item, (*above, id(value)))


class Present:
    """Stands for what is there and is not compared."""

    def __repr__(self) -> str:
        return "saved"


PRESENT = Present()


def _inside(value: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield (key if isinstance(key, (str, int)) else repr(key)), item
        state = getattr(value, "state", None)
        if isinstance(state, Mapping):
            yield from _inside(state)
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    else:
        yield "class", repr(value.cls)
        for part in (value.state, value.items, value.appends):
            if isinstance(part, (dict, list, tuple)):
                yield from _inside(part)
            elif part is not None:
                yield "state", part
        if value.args:
            yield "args", value.args


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes, Tensor)):
        return value
    return repr(value)


def _flat(value: Any) -> list[Any] | None:
    """A list of plain values, or of such lists; None for anything else."""
    out: list[Any] = []
    for item in value:
        if isinstance(item, (list, tuple)):
            inner = _flat(item)
            if inner is None:
                return None
            out.append(inner)
        elif item is None or isinstance(item, (bool, int, float, str)):
            out.append(item)
        else:
            return None
    return out


def same(one: Any, other: Any) -> bool:
    """Whether two leaves hold the same; NaN is NaN, and 1 is not 1.0 nor True."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.size) == (other.dtype, other.size)
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
