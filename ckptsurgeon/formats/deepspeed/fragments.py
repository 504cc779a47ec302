"""Which elements of a flat ZeRO partition belong to which parameter.

Stages 1 and 2 write it down (`param_slice_mappings`). Stage 3 does not: there each parameter gives
ceil(numel / ranks) elements to every rank, in the order of `param_shapes`
(`deepspeed/utils/zero_to_fp32.py`), and a flat tensor ends with the last of them that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.pickles.tree import Object, Tensor, get
from ckptsurgeon.formats.deepspeed import universal
from ckptsurgeon.formats.deepspeed.optimizer import Optimizer, around
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.fields.understood import is_count, not_understood
from ckptsurgeon.formats.fields.values import Part, Place
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

MAPPINGS = "param_slice_mappings"


class Fragment(NamedTuple):
    """What one parameter has in the flat tensor at `place`: its elements [start, end)."""

    parameter: str
    place: Place
    start: int
    end: int


def moments(checkpoint: DeepSpeedShards, name: str) -> list[Part]:
    """Every parameter's part of every tensor `name`, in all shards and in the universal copy."""
    places = checkpoint.locate(name)
    out: list[Part] = []
    for item in checkpoint.all_optimizers():
        if item.universal:
            wholes = universal.moment(checkpoint, item.file, name)
            out += (Part.whole(place.file.parent.name, "", name, place) for place in wholes)
            continue
        mine = [place for place in places if place.file == item.file]
        found = fragments(checkpoint, item, mine)
        out += (Part(f.parameter, "", name, f.place, f.start, f.end, 0) for f in found)
    return out


def fragments(
    checkpoint: DeepSpeedShards, item: Optimizer, places: list[Place]
) -> Iterator[Fragment]:
    """Whose the elements of the flat tensors at `places` are, which are all of one kind in one
    shard. Raises SurgeryError where the shard does not say."""
    outer = around(checkpoint, item)
    mappings = outer.get(MAPPINGS)
    if not isinstance(mappings, (list, tuple)) or len(mappings) != len(places):
        yield from _computed(checkpoint, item, places)
        return
    for i, (mapping, place) in enumerate(zip(mappings, places, strict=True)):
        at = (*item.outer, MAPPINGS, i)
        if not isinstance(mapping, Mapping):
            raise not_understood(item.file, at, mapping, "the parameters of a flat tensor")
        for parameter, address in mapping.items():
            start, numel = _address(item, (*at, parameter), address)
            yield Fragment(parameter, place, start, start + numel)


def _address(item: Optimizer, path: tuple[Key, ...], found: Any) -> tuple[int, int]:
    """First element and size. Raises NotUnderstood for what says neither."""
    with suppress(KeyError):
        start, numel = get(found, ("start",)), get(found, ("numel",))
        if is_count(start) and is_count(numel):
            return start, numel
    raise not_understood(item.file, path, found, "a place in a flat tensor")


def _computed(
    checkpoint: DeepSpeedShards, item: Optimizer, places: list[Place]
) -> Iterator[Fragment]:
    """The parts of stage 3, padding included."""
    models = checkpoint.models().values()
    shapes = next((tree["param_shapes"] for tree in models if tree.get("param_shapes")), None)
    if not shapes or "fp32_flat_groups" not in around(checkpoint, item):
        raise SurgeryError(
            f"{item.file.name} does not say which parameter an element of its moments belongs to "
            "(ZeRO 0 numbers them)",
            next=command("reset", "moments", why="of all parameters"),
        )
    ranks = int(next(iter(models)).get("dp_world_size", 1))
    left = (
        (name, -(-math.prod(sizes(shape)) // ranks))
        for group in shapes
        for name, shape in group.items()
    )
    for place in places:
        size = place.value.numel if isinstance(place.value, Tensor) else 0
        at = 0
        while at < size:
            name, numel = next(left, ("", size + 1))
            if at + numel > size:
                raise SurgeryError(
                    f"{item.file.name}: the shapes of the parameters do not add up to its flat "
                    f"tensors ({count(at + numel, 'element')}, not {size})",
                    next=command("reset", "moments", why="of all parameters"),
                )
            yield Fragment(name, place, at, at + numel)
            at += numel


def sizes(shape: Any) -> tuple[int, ...]:
    """A torch.Size as it is in a file."""
    numbers = shape.args[0] if isinstance(shape, Object) and shape.args else shape
    return tuple(int(size) for size in numbers)
