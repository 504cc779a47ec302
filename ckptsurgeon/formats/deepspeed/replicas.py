"""Where the tensor-parallel ranks of a DeepSpeed checkpoint each keep a copy of one parameter.

Layer norms, position embeddings and the biases of row-parallel layers are whole on every rank, and
every rank updates its own copy. They should stay equal; at BLOOM's start they did not
(BigScience, tr11 chronicle, March 2022).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats.deepspeed.optimizer import OPTIM
from ckptsurgeon.formats.deepspeed.parallel import LAYER, sizes
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.deepspeed.weights import COLUMNS, ROWS
from ckptsurgeon.formats.values import Copy, Place, Replica
from ckptsurgeon.hints import command

RANK = re.compile(r"mp_rank_(\d+)")


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
    parameters: dict[tuple[Any, ...], list[Copy]] = {}
    for key, copy in (*_weights(checkpoint, tensor), *_partitions(checkpoint, tensor)):
        parameters.setdefault(key, []).append(copy)
    return [
        Replica(str(key[0]), str(key[1]), tuple(copies))
        for key, copies in parameters.items()
        if len(copies) == tensor
    ]


def _weights(checkpoint: DeepSpeedShards, tensor: int) -> Iterator[tuple[tuple[Any, ...], Copy]]:
    layers = [path for path in sorted(checkpoint.folder.iterdir()) if LAYER.fullmatch(path.name)]
    checkpoint.read(layers)
    for path in layers:
        layer = path.name.partition("-")[0]
        yield from _in(checkpoint, path, (), f"{int(layer[6:])}.", layer)
    if not layers:
        for path in checkpoint.models():
            yield from _in(checkpoint, path, ("module",), "", _rank(path) // tensor)


def _in(
    checkpoint: DeepSpeedShards, file: Path, path: tuple[Key, ...], prefix: str, where: Any
) -> Iterator[tuple[tuple[Any, ...], Copy]]:
    weights = get(checkpoint.trees[file], path) if path else checkpoint.trees[file]
    for name, tensor in (weights or {}).items():
        if isinstance(tensor, Tensor) and _is_whole(name):
            yield (prefix + name, "weights", where), Copy(Place(file, (*path, name), tensor), None)


def _partitions(checkpoint: DeepSpeedShards, tensor: int) -> Iterator[tuple[tuple[Any, ...], Copy]]:
    for item in checkpoint.optimizers():
        match = OPTIM.fullmatch(item.file.name)
        outer = get(checkpoint.trees[item.file], item.outer)
        mappings = outer.get("param_slice_mappings")
        if match is None or not isinstance(mappings, (list, tuple)):
            raise SurgeryError(
                f"{item.file.name} does not say which parameter its moments belong to",
                next="sync-replicas works on ZeRO 1 and 2",
            )
        for i, mapping in enumerate(mappings):
            places: dict[str, tuple[Key, ...]] = {
                "master": (*item.outer, "single_partition_of_fp32_groups", i),
                "exp_avg": (*item.base, "state", i, "exp_avg"),
                "exp_avg_sq": (*item.base, "state", i, "exp_avg_sq"),
            }
            for name, start, end in _fragments(mapping):
                for kind, path in places.items():
                    for place in checkpoint.at(item.file, path):
                        key = (name, kind, int(match["mp"]) // tensor, match["dp"], i, start, end)
                        yield key, Copy(place, (start, end))


def _fragments(mapping: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    for name, address in mapping.items():
        if _is_whole(name):
            start = get(address, ("start",))
            yield name, start, start + get(address, ("numel",))


def _is_whole(name: str) -> bool:
    return not (ROWS.search(name) or COLUMNS.search(name))


def _rank(path: Path) -> int:
    match = RANK.search(path.name)
    return int(match[1]) if match else 0
