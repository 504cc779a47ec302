"""Mutations of the surgeon's own records that know what they are made of: keys, types, names."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from tests.support.snapshot import HOME

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1e308, -0.5, "", "x", "\0", "\udcff",
    "\x1b[2J", "²", "0001", "../victim/file", "/", ".", f"{HOME}/lock", [], {}, [[]], [None],
    {"kind": "Move"}, {"kind": "Nothing"}, {"base64": "!"}, {"base64": 5}, "a" * 5000,
)  # fmt: skip
"""What takes the place of a value."""


def mutated(document: Any, chance: random.Random) -> Any:
    """A copy with one to three changes anywhere in it: a value is another one, or goes, or comes
    twice; a key is gone, or new; two values change places."""
    changed = {"root": copy.deepcopy(document)}
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        place, key = chance.choice(list(_places(changed)))
        act = chance.randrange(6)
        if act == 0 and place is not changed:
            del place[key]
        elif act == 1:
            other, there = chance.choice(list(_places(changed)))
            place[key] = copy.deepcopy(other[there])
        elif act == 2 and isinstance(place[key], dict):
            place[key][chance.choice(("kind", "more", "id", "keys", ""))] = chance.choice(ODD)
        elif act == 3 and isinstance(place[key], list):
            place[key] = place[key] * chance.choice((0, 2, 30))
        elif act == 4 and isinstance(place[key], str):
            text = place[key]
            at = chance.randrange(len(text) + 1)
            place[key] = (
                text[:at] + chance.choice(("../", "/", "\0", "\n", "é", "")) + text[at + 1 :]
            )
        elif act == 4 and isinstance(place[key], int):
            place[key] += chance.choice((-1, 1, 1 << 40, -(1 << 40)))
        else:
            place[key] = copy.deepcopy(chance.choice(ODD))
    return changed["root"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in a document that holds a value: what it is in, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from _places(item)
