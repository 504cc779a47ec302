"""Where the consolidated weights of a DeepSpeed checkpoint lie, byte range by byte range.

Stages 0 to 2 keep them whole in the model or layer files, stage 3 as partitions of the fp32
masters. Tensor-parallel parts are joined as Megatron cut them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.storage_edit import contiguous
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats.deepspeed import fragments
from ckptsurgeon.formats.deepspeed.parallel import LAYER
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.values import Place, Weight

ROWS = re.compile(
    r"(word_embeddings|query_key_value|dense_h_to_4h|lm_head|(^|\.)head)\.(weight|bias)$"
)
"""Cut along axis 0: Megatron's vocabulary- and column-parallel parameters."""
COLUMNS = re.compile(r"(\.|^)(dense|dense_4h_to_h)\.weight$")
"""Cut along axis 1: its row-parallel ones. Their biases, and all else, are whole on each rank."""

EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")

Part = tuple[Archive, Tensor]


def weights(checkpoint: DeepSpeedShards) -> Iterator[Weight]:
    """Every weight with its name, in the order of the shards. Raises SurgeryError for parts that
    can't be joined."""
    if checkpoint.stage() == 3:
        yield from _partitioned(checkpoint)
        return
    layers: dict[str, list[Path]] = {}
    for path in sorted(checkpoint.folder.iterdir()):
        if match := LAYER.fullmatch(path.name):
            layers.setdefault(match[1], []).append(path)
    for layer, paths in sorted(layers.items()):
        archives = [Archive.open(path) for path in paths]
        yield from _joined(f"{layer}.", archives, [archive.tree() for archive in archives])
    if not layers:
        # Those of a universal copy beside them are the same once more.
        models = {p: t for p, t in checkpoint.models().items() if p.parent == checkpoint.folder}
        trees = [tree["module"] for tree in models.values()]
        yield from _joined("", [checkpoint.archives[path] for path in models], trees)
    for expert in experts(path.name for path in checkpoint.folder.iterdir()):
        archives = [Archive.open(checkpoint.folder / name) for name in expert]
        yield from _joined("", archives, [archive.tree() for archive in archives])


def experts(names: Iterable[str]) -> list[list[str]]:
    """The files of each expert of each layer, in the order of the tensor ranks."""
    files: dict[tuple[int, int], dict[int, str]] = {}
    for name in names:
        if match := EXPERT.fullmatch(name):
            layer, expert, rank = map(int, match.groups())
            files.setdefault((layer, expert), {})[rank] = name
    return [[by_rank[rank] for rank in sorted(by_rank)] for _, by_rank in sorted(files.items())]


def _joined(prefix: str, archives: Sequence[Archive], trees: Sequence[Any]) -> Iterator[Weight]:
    for name, first in trees[0].items():
        if not isinstance(first, Tensor):
            continue
        parts = [(archive, tree[name]) for archive, tree in zip(archives, trees, strict=True)]
        axis = 0 if ROWS.search(name) else 1 if COLUMNS.search(name) else None
        if len(parts) == 1 or axis is None:
            yield _weight(prefix + name, parts[:1], 0)
        else:
            yield _weight(prefix + name, parts, axis)


def _weight(name: str, parts: Sequence[Part], axis: int) -> Weight:
    tensors = [tensor for _, tensor in parts]
    shape = list(tensors[0].size)
    if len(parts) > 1:
        if len(shape) <= axis or any(t.dtype != tensors[0].dtype for t in tensors):
            raise SurgeryError(
                f"{name}: its tensor-parallel parts can't be joined",
                next="join them with the converter of the trainer",
            )
        shape[axis] = sum(tensor.size[axis] for tensor in tensors)
    for _, tensor in parts:
        if not contiguous(tensor):
            raise SurgeryError(
                f"{name}: its elements do not lie in the order of its shape",
                next="join them with the converter of the trainer",
            )
    spans: list[tuple[Path, int, int]] = []
    outer = math.prod(shape[:axis])
    for row in range(outer):
        for archive, tensor in parts:
            archive.storage(tensor)
            length = tensor.numel // outer * ITEM_BYTES[tensor.dtype]
            start = archive.payload(f"data/{tensor.storage}")
            start += tensor.offset * ITEM_BYTES[tensor.dtype] + row * length
            spans.append((archive.path, start, start + length))
    return Weight(name, tensors[0].dtype, tuple(shape), tuple(spans))


def _partitioned(checkpoint: DeepSpeedShards) -> Iterator[Weight]:
    """Stage 3: rank after rank holds ceil(numel / ranks) elements of each fp32 master."""
    by_name: dict[str, list[tuple[Path, int, int]]] = {}
    for item in sorted(checkpoint.optimizers(), key=lambda item: _rank(item.file)):
        flats = get(checkpoint.trees[item.file], (*item.outer, "fp32_flat_groups"))
        places = [
            Place(item.file, (*item.outer, "fp32_flat_groups", i), flat)
            for i, flat in enumerate(flats)
        ]
        archive = checkpoint.archives[item.file]
        for name, place, start, end in fragments.fragments(checkpoint, item, places):
            archive.storage(place.value)
            base = archive.payload(f"data/{place.value.storage}")
            at = base + (place.value.offset + start) * 4
            by_name.setdefault(name, []).append((item.file, at, at + (end - start) * 4))
    for shapes in next(iter(checkpoint.models().values()))["param_shapes"]:
        for name, shape in shapes.items():
            sizes = fragments.sizes(shape)
            left, spans = math.prod(sizes) * 4, []
            for path, start, end in by_name[name]:  # the last ones end with padding
                end = min(end, start + left)
                left -= end - start
                if start < end:
                    spans.append((path, start, end))
            yield Weight(name, "float32", sizes, tuple(spans))


def _rank(path: Path) -> int:
    match = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(match[1]) if match else 0
