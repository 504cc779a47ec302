"""Two steps that are cut into shards in different ways: what they mean, and joined tensors by name.

The arguments, which hold the sizes of the cut among much else, are compared by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import METADATA, Saved
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.formats import Checkpoint, Place, Weight
from ckptsurgeon.formats.capabilities import HasWeights
from ckptsurgeon.formats.tensors.strips import contiguous, strips
from ckptsurgeon.look.diff.files import shown
from ckptsurgeon.look.diff.leaves import Leaves, same
from ckptsurgeon.look.diff.versions import Version
from ckptsurgeon.plans.edits import ABSENT, AnyChange, Change, Key

FIELDS = ("tokens", "gigaflos", "batch_size", "rampup", "peak_lr", "scheduler")
"""Of a state, besides its promise and its schedule."""
KEPT = ("exp_avg", "exp_avg_sq", "master")
ARGUMENTS = "args"


def cut(files: Mapping[str, Version]) -> frozenset[Any]:
    """How a step is cut: the names of its shards, and where chunks lie in their tensors (of
    millions, by a digest)."""
    names: set[Any] = {name for name, version in files.items() if version.is_tree}
    for name, version in files.items():
        if version.path.name == METADATA:
            items = Saved.open(version.path.parent).items
            names |= {(name, fqn, _digest(found.offsets())) for fqn, found in items.items()}
    return frozenset(names)


def _digest(offsets: Iterable[tuple[int, ...] | None]) -> bytes:
    digest = hashlib.sha256()
    for offset in offsets:
        digest.update(repr(offset).encode())
    return digest.digest()


def meaning(one: Checkpoint, other: Checkpoint) -> list[AnyChange]:
    """The fields of both states that differ, in no file."""
    mine, its = one.state(), other.state()
    pairs: list[tuple[str, Any, Any]] = [("step", mine.step, its.step)]
    for name, value in vars(mine.promise).items():
        if name != "step":
            pairs.append((name, value, getattr(its.promise, name)))
    ours, theirs = mine.schedule or {}, its.schedule or {}
    for key in dict.fromkeys([*ours, *theirs]):
        pairs.append((key, ours.get(key), theirs.get(key)))
    pairs += [(name, getattr(mine, name), getattr(its, name)) for name in FIELDS]
    return [Change("", name, old, new) for name, old, new in pairs if old != new]


def arguments(ones: Mapping[str, Version], others: Mapping[str, Version]) -> Iterator[AnyChange]:
    """The arguments of the first file that has any, by name."""
    old, new = _arguments(ones), _arguments(others)
    for path in dict.fromkeys([*old, *new]):
        before, after = old.get(path, ABSENT), new.get(path, ABSENT)
        if not same(before, after):
            yield Change("", str(path[-1]), shown(before), shown(after), (ARGUMENTS, *path))


def _arguments(files: Mapping[str, Version]) -> Leaves:
    for _, version in sorted(files.items()):
        if not version.is_tree:
            continue
        found: dict[tuple[Key, ...], Any] = {}
        for path, leaf in version.content().leaves.items():
            if ARGUMENTS in path[:-1]:
                inside = path[path.index(ARGUMENTS) + 1 :]
                if inside[0] != "class":
                    found[inside] = leaf
        if found:
            return found
    return {}


def joined(checkpoint: Checkpoint, weights: Iterable[Weight]) -> Iterator[Weight]:
    """Moments and masters of each of `weights`, its parts in the order of the shards. None where
    tensor ranks cut the parameters, or what is there does not add up to the weight."""
    if checkpoint.state().model_parallel > 1:
        return
    sizes = {weight.name: weight for weight in weights}
    parts: dict[tuple[str, str], list[tuple[Any, int, int]]] = {}
    dtypes: dict[tuple[str, str], str] = {}
    for strip in strips(checkpoint):
        for kind in KEPT:
            if kind in strip.tensors and strip.parameter in sizes:
                place, first = strip.tensors[kind]
                key = (kind, strip.parameter)
                if _filled(parts.get(key, ()), sizes[strip.parameter], place):
                    continue  # of a copy of it
                flat = len(place.value.size) == 1
                if not contiguous(place.value) or (not flat and key in parts):
                    sizes.pop(strip.parameter)
                    break
                width = ITEM_BYTES[place.value.dtype]
                archive = checkpoint.holder(place)
                start = archive.start + archive.payload(f"data/{place.value.storage}")
                start += (place.value.offset + first) * width
                part = (archive.path, start, start + strip.numel * width)
                parts.setdefault(key, []).append(part)
                dtypes[key] = place.value.dtype
    for (kind, name), spans in parts.items():
        if name in sizes:
            weight = sizes[name]
            size = _numel(weight.shape) * ITEM_BYTES[dtypes[kind, name]]
            whole = tuple(_first(spans, size))
            if sum(end - start for _, start, end in whole) == size:
                yield Weight(f"{kind} of {name}", dtypes[kind, name], weight.shape, whole)


def _filled(spans: Iterable[tuple[Any, int, int]], weight: Weight, place: Place) -> bool:
    """Whether these bytes are as many as the weight has elements."""
    size = _numel(weight.shape) * ITEM_BYTES[place.value.dtype]
    return sum(end - start for _, start, end in spans) >= size


def _first(spans: Iterable[tuple[Any, int, int]], size: int) -> Iterator[tuple[Any, int, int]]:
    """So many bytes of them: the last ones may end with padding."""
    for path, start, end in spans:
        end = min(end, start + size)
        size -= end - start
        if start < end:
            yield path, start, end


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def tensors(one: Checkpoint, other: Checkpoint) -> tuple[list[Weight], list[Weight], str]:
    """Weights, masters and moments of both, joined by name; and what of them is on one side alone
    and so can't be compared. Raises SurgeryError where weights can't be joined."""
    found = []
    for checkpoint in (one, other):
        weights = list(HasWeights.of(checkpoint).weights())
        try:
            found.append((weights, list(joined(checkpoint, weights))))
        except SurgeryError:
            found.append((weights, []))
    names = [{weight.name for weight in kept} for _, kept in found]
    both = names[0] & names[1]
    left = "" if names[0] == names[1] and both else "masters and moments that only one side names"
    mine, its = ([*weights, *(k for k in kept if k.name in both)] for weights, kept in found)
    return mine, its, left
