"""A tree with some of its leaves replaced, and nothing else copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptsurgeon.files.pickles.tree import Object, keys_of
from ckptsurgeon.plans.edits import ABSENT, Each, Key, Renamed
from ckptsurgeon.plans.frozen import frozen


@frozen
class New:
    """What a leaf of a patch becomes; what is above it is a dict by key."""

    value: Any


def plant(patch: dict[Key, Any], path: Sequence[Key | Each], new: New) -> None:
    """Have each leaf that `path` leads to become `new` in `patch`."""
    nodes = [patch]
    for step in path[:-1]:
        nodes = [node.setdefault(key, {}) for node in nodes for key in keys_of(step)]
    for key in keys_of(path[-1]):
        for node in nodes:
            node[key] = new


def patched(tree: Any, patch: Mapping[Key, Any]) -> Any:
    """A copy of `tree` with the leaves of `patch`; nothing that it does not lead to is copied."""
    is_dict = isinstance(tree, dict)
    if not is_dict and isinstance(tree, Object):
        return replace(tree, state=patched(tree.state, patch))
    items = tree.copy() if is_dict else dict(enumerate(tree))
    for key, new in patch.items():
        if not isinstance(new, New):
            items[key] = patched(items[key], new)
        elif isinstance(new.value, Renamed):
            items[new.value.key] = items.pop(key)
        elif new.value == ABSENT:
            del items[key]
        else:
            items[key] = new.value
    if is_dict:
        return items
    return tuple(items.values()) if isinstance(tree, tuple) else list(items.values())
