"""Where the tensor-parallel ranks of a DeepSpeed checkpoint each keep a copy of one parameter.

Layer norms, position embeddings and the biases of row-parallel layers are whole on every rank, and
every rank updates its own copy. They should stay equal; at BLOOM's start they did not
(BigScience, tr11 chronicle, March 2022).
"""

from __future__ import annotations

from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.deepspeed import parts
from ckptsurgeon.formats.deepspeed.optimizer import around
from ckptsurgeon.formats.deepspeed.parallel import LAYER, sizes
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.fields.values import Copy, Replica
from ckptsurgeon.hints import command


def replicas(checkpoint: DeepSpeedShards) -> list[Replica]:
    """Every replicated parameter with its copies of weights, fp32 masters and moments: of ZeRO 1
    and 2 the part that each data-parallel rank holds. Empty with one tensor rank."""
    tree = next(iter(checkpoint.models().values()))
    tensor = sizes(tree).tensor
    if tensor == 1:
        return []
    if tensor is None:
        raise SurgeryError(
            f"{checkpoint.path.name} does not say by how many tensor-parallel ranks it was saved",
            next=command("show", why="what the checkpoint keeps"),
        )
    for item in checkpoint.optimizers():
        outer = around(checkpoint, item)
        if not isinstance(outer.get("param_slice_mappings"), (list, tuple)):
            raise SurgeryError(
                f"{item.file.name} does not say which parameter its moments belong to",
                next="sync-replicas works on ZeRO 1 and 2",
            )
    copies: dict[tuple[Any, ...], list[Copy]] = {}
    weights = (
        part
        for part in parts.saved_weights(checkpoint, with_experts=False)
        if part.place.file.parent == checkpoint.folder
    )
    for part in (*weights, *parts.partitioned(checkpoint, strict=True)):
        if part.box is not None and part.box.replica:
            # Each stage of a pipeline has a copy of what it ties, in a layer of its own.
            layer = LAYER.fullmatch(part.place.file.name)
            where = layer[1] if layer else part.cut.partition(" of ")[2]
            elements = None if part.kind == "weights" else (part.start, part.end)
            key = (part.parameter, part.kind, where, part.first, part.end - part.start)
            copies.setdefault(key, []).append(Copy(part.place, elements))
    return [
        Replica(name, kind, tuple(found))
        for (name, kind, *_), found in copies.items()
        if len(found) == tensor
    ]
