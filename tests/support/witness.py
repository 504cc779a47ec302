"""A plan's list of changes and a diff of the files, in a form in which they can be equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckptsurgeon.look.diff.diff import Diff
from ckptsurgeon.plans.edits import ABSENT, ZEROS, AnyChange, Aside, Change, Elements, Fill, Renamed

Seen = set[tuple[Any, ...]]


def of_plan(changes: Iterable[AnyChange], diff: Seen) -> Seen:
    """What is to change, value by value. `diff` says which places are tensors: a plan's word for
    all zeros is the same for those and for a number."""
    tensors = {(item[1], item[2]) for item in diff if item[0] == "tensor"}
    out: Seen = set()
    for item in (one for several in changes for one in each(several)):
        if isinstance(item, Change) and (item.file, item.path) in tensors:
            out.add(("tensor", item.file, item.path))
        elif isinstance(item, Change) and (item.file, (*item.path, 0)) in tensors:
            # Saved in chunks, which a plan counts and a diff compares one by one.
            out |= {("tensor", item.file, (*item.path, chunk)) for chunk in range(item.chunks)}
        elif isinstance(item, Change) and not isinstance(item.new, (Elements, Fill)):
            out |= set(_values(item))
        elif isinstance(item, Change):
            out.add(("tensor", item.file, item.path))
        else:
            out.add(("aside" if isinstance(item, Aside) else "rewrite", item.file))
    return out


def each(item: AnyChange) -> Sequence[AnyChange]:
    """A change of several places as one of each."""
    return item.single() if isinstance(item, Change) else [item]


def of_diff(diff: Diff) -> Seen:
    """What has changed."""
    assert diff.tensors is not None
    assert not diff.tensors.missing and not diff.tensors.reshaped
    out: Seen = {("tensor", item.file, item.path) for item in diff.tensors.changed}
    for item in diff.changes:
        if isinstance(item, Change):
            out |= set(_values(item))
        else:
            out.add(("aside" if isinstance(item, Aside) else "rewrite", item.file))
    return out


def _values(change: Change) -> Iterator[tuple[Any, ...]]:
    new = change.new
    if isinstance(new, Renamed):
        yield "value", change.file, change.path, change.old, ABSENT
        yield "value", change.file, (*change.path[:-1], new.key), ABSENT, change.old
        return
    if new == ZEROS:
        new = 0
    yield from _leaves(change.file, change.path, change.old, new)


def _leaves(file: str, path: tuple[Any, ...], old: Any, new: Any) -> Iterator[tuple[Any, ...]]:
    """A list, number by number: a plan may name all of it where one number changes."""
    both = isinstance(old, (list, tuple)) and isinstance(new, (list, tuple))
    if both and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _leaves(file, (*path, i), one, other)
    elif old != new:
        yield "value", file, path, _hashable(old), _hashable(new)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
