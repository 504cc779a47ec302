"""A tree with some of its leaves replaced, and nothing else copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptsurgeon.files.pickles.tree import Object
from ckptsurgeon.plans.edits import ABSENT, Key, Renamed


@dataclass(frozen=True)
class New:
    """What a leaf of a patch becomes; what is above it is a dict by key."""

    value: Any


def patched(tree: Any, patch: Mapping[Key, Any]) -> Any:
    """A copy of `tree` with the leaves of `patch`; nothing that it does not lead to is copied."""
    if isinstance(tree, Object):
        return replace(tree, state=patched(tree.state, patch))
    items = tree.copy() if isinstance(tree, dict) else dict(enumerate(tree))
    for key, new in patch.items():
        if not isinstance(new, New):
            items[key] = patched(items[key], new)
        elif isinstance(new.value, Renamed):
            items[new.value.key] = items.pop(key)
        elif new.value == ABSENT:
            del items[key]
        else:
            items[key] = new.value
    if isinstance(tree, dict):
        return items
    return tuple(items.values()) if isinstance(tree, tuple) else list(items.values())
