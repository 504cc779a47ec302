"""Weights of a ZeRO step that no update reaches: frozen ones, and buffers.

ZeRO 2 and 3 save what is frozen once more (`frozen_param_fragments`), in pieces of each data rank
under stage 3, and a load takes it from there. Without ZeRO they are weights among others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.deepspeed import parts
from ckptsurgeon.formats.deepspeed.fragments import sizes
from ckptsurgeon.formats.deepspeed.parallel import TensorRank, box
from ckptsurgeon.formats.deepspeed.shards import MODEL, DeepSpeedShards
from ckptsurgeon.formats.fields.values import Part, Place

FRAGMENTS = "frozen_param_fragments"


def still(checkpoint: DeepSpeedShards, known: Sequence[Part]) -> Iterator[Part]:
    """Each of them that is none of `known`; first where a load takes it from."""
    if not checkpoint.sharded:
        return
    for path, tree in checkpoint.models().items():
        yield from _fragments(path, tree, parts.tensor_rank(checkpoint, path))
    names = {part.parameter for part in known} | parts.trainable(checkpoint)
    for part in parts.named_weights(checkpoint, known):
        if part.parameter not in names and part.end:  # stage 3 leaves names without elements
            yield part


def _fragments(path: Path, tree: Mapping[str, Any], rank: TensorRank) -> Iterator[Part]:
    shapes = tree.get("frozen_param_shapes") or {}
    for name, tensor in (tree.get(FRAGMENTS) or {}).items():
        if not isinstance(tensor, Tensor) or name not in shapes:
            continue
        shape = sizes(shapes[name])
        whole, first = prod(shape), 0
        match = MODEL.fullmatch(path.name)
        if match is not None and match["dp"] and tensor.numel:
            pieces = -(-whole // tensor.numel)
            first = int(match["dp"]) % pieces * tensor.numel
        end = min(tensor.numel, whole - first)  # the last rank has more than is left
        place = Place(path, (FRAGMENTS, name), tensor)
        if end > 0:
            block = box(str(name), shape, rank)
            yield Part(str(name), str(rank.number), "weights", place, 0, end, first, block)
