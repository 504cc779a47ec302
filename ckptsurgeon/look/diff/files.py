"""The changes between two versions of the same files, as a plan would list them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptsurgeon.errors import count
from ckptsurgeon.look.diff.leaves import same
from ckptsurgeon.look.diff.versions import Content, Held, Version
from ckptsurgeon.plans.edits import ABSENT, AnyChange, Aside, Change, Key, Rewrite
from ckptsurgeon.plans.edits import Content as NewBytes


@dataclass
class Twin:
    """A tensor that both sides have under one path, with the same element type and shape."""

    file: str
    path: tuple[Key, ...]
    one: Held
    other: Held


@dataclass
class Difference:
    """What differs: `changes` of values, files and pointers; tensors that both have, and those that
    one side lacks or has in another shape: (file, path, shape of the first, of the second).
    `shared` are files of both that are one and the same."""

    changes: list[AnyChange] = field(default_factory=list)
    twins: list[Twin] = field(default_factory=list)
    reshaped: list[tuple[str, tuple[Key, ...], Any, Any]] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)


def compare(ones: Mapping[str, Version], others: Mapping[str, Version]) -> Difference:
    """By the name of each file. What only one side has is said once, not value by value."""
    out = Difference()
    for name in dict.fromkeys([*ones, *others]):
        one, other = ones.get(name), others.get(name)
        if one is None or other is None:
            gone = other is None
            out.changes.append(Aside(name, "file") if gone else _made(name))
        elif one.same_bytes(other):
            out.shared.append(name)
        else:
            _compare(out, name, one.content(), other.content())
    return out


def _made(name: str) -> Rewrite:
    return Rewrite(name, "file", NewBytes(()), "new", new_file=True)


def _compare(out: Difference, name: str, one: Content, other: Content) -> None:
    for path in dict.fromkeys([*one.leaves, *other.leaves]):
        old, new = one.leaves.get(path, ABSENT), other.leaves.get(path, ABSENT)
        if not same(old, new):
            before, after = shown(old), shown(new)
            if before == after:  # as many entries, and others
                after = f"others, {after}"
            out.changes.append(Change(name, field_of(path, name), before, after, path))
    held, its = one.tensors, other.tensors
    for path in dict.fromkeys([*held, *its]):
        mine, theirs = held.get(path), its.get(path)
        if mine is not None and theirs is not None and same(mine.tensor, theirs.tensor):
            out.twins.append(Twin(name, path, mine, theirs))
        else:
            out.reshaped.append((name, path, _kind(mine), _kind(theirs)))


def _kind(held: Held | None) -> str | None:
    """Element type and shape."""
    return None if held is None else f"{held.tensor.dtype} {list(held.tensor.size)}"


def field_of(path: tuple[Key, ...], file: str) -> str:
    """What a change of the leaf at `path` is called: its last name."""
    words = [key for key in path if isinstance(key, str)]
    return words[-1] if words else file.rpartition("/")[2]


def shown(leaf: Any) -> Any:
    """A leaf as a change has it; of a list of records only how many there are."""
    if isinstance(leaf, list) and any(isinstance(item, (dict, list)) for item in leaf):
        return count(len(leaf), "entry", "entries")
    if isinstance(leaf, bytes):
        return count(len(leaf), "byte")
    if isinstance(leaf, tuple):
        return count(leaf[1], "byte")
    return leaf if leaf is None or isinstance(leaf, (bool, int, float, str, list)) else repr(leaf)
