"""Which elements of a flat ZeRO partition belong to which parameter.

Stages 1 and 2 write it down (`param_slice_mappings`). Stage 3 does not: there each parameter gives
ceil(numel / ranks) elements to every rank, in the order of `param_shapes`
(`deepspeed/utils/zero_to_fp32.py`), and a flat tensor ends with the last of them that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Object, Tensor, get
from ckptsurgeon.formats.deepspeed import universal
from ckptsurgeon.formats.deepspeed.optimizer import Optimizer
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.values import Fragment, Place


def fragments(checkpoint: DeepSpeedShards, name: str) -> list[Fragment]:
    """Every parameter's part of every tensor `name`, in all shards and in the universal copy."""
    places = checkpoint.locate(name)
    out: list[Fragment] = []
    for item in checkpoint.all_optimizers():
        if item.universal:
            wholes = universal.moment(checkpoint, item.file, name)
            out += (Fragment(p.file.parent.name, p, 0, p.value.numel) for p in wholes)
            continue
        mine = [place for place in places if place.file == item.file]
        outer = get(checkpoint.trees[item.file], item.outer)
        mappings = outer.get("param_slice_mappings")
        if isinstance(mappings, (list, tuple)) and len(mappings) == len(mine):
            for mapping, place in zip(mappings, mine, strict=True):
                out += written_down(mapping, place)
        else:
            out += computed(checkpoint, item, mine)
    return out


def written_down(mapping: Mapping[str, Any], place: Place) -> Iterator[Fragment]:
    """The parts of stages 1 and 2, as the shard has them for the flat tensor at `place`."""
    for parameter, address in mapping.items():
        start, numel = get(address, ("start",)), get(address, ("numel",))
        yield Fragment(parameter, place, start, start + numel)


def computed(
    checkpoint: DeepSpeedShards, item: Optimizer, places: list[Place]
) -> Iterator[Fragment]:
    """The parts of stage 3, in the flat tensors at `places` of one shard, padding included."""
    models = checkpoint.models().values()
    shapes = next((tree["param_shapes"] for tree in models if tree.get("param_shapes")), None)
    if not shapes or "fp32_flat_groups" not in get(checkpoint.trees[item.file], item.outer):
        raise SurgeryError(
            f"{item.file.name} does not say which parameter an element of its moments belongs to "
            "(ZeRO 0 numbers them)",
            next="ckptsurgeon reset moments    of all parameters",
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
                    f"tensors ({at + numel} elements, not {size})",
                    next="ckptsurgeon reset moments    of all parameters",
                )
            yield Fragment(name, place, at, at + numel)
            at += numel


def sizes(shape: Any) -> tuple[int, ...]:
    """A torch.Size as it is in a file."""
    numbers = shape.args[0] if isinstance(shape, Object) and shape.args else shape
    return tuple(int(size) for size in numbers)
