"""Where the consolidated weights of a DeepSpeed checkpoint lie, byte range by byte range.

Stages 0 to 2 keep them whole in the model or layer files, stage 3 as partitions of the fp32
masters. Tensor-parallel parts are joined as Megatron cut them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.storage_edit import contiguous
from ckptsurgeon.formats.deepspeed import parts
from ckptsurgeon.formats.deepspeed.parallel import GATED, LAYER, axis, is_gated
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.fields.values import Part, Weight


def weights(checkpoint: DeepSpeedShards) -> Iterator[Weight]:
    """Every weight with its name, in the order of the shards. Raises SurgeryError for parts that
    can't be joined."""
    if checkpoint.stage() == 3:
        yield from _partitioned(checkpoint)
        return
    gated = any(map(is_gated, checkpoint.models().values()))
    ranks: dict[str, list[Part]] = {}
    for part in parts.saved_weights(checkpoint, with_experts=True):
        # Those of a universal copy beside them are the same once more.
        if part.place.file.parent == checkpoint.folder:
            ranks.setdefault(_exported(part), []).append(part)
    for name, found in ranks.items():
        found.sort(key=lambda part: int(part.cut))
        cut = axis(name)
        blocks = 2 if gated and GATED.search(name) else 1
        yield _weight(checkpoint, name, found[:1] if cut is None else found, cut or 0, blocks)


def _exported(part: Part) -> str:
    """With the number of a layer as its file has it."""
    layer = LAYER.fullmatch(part.place.file.name)
    return f"{layer[1]}.{part.place.path[-1]}" if layer else part.parameter


def _weight(
    checkpoint: DeepSpeedShards, name: str, found: Sequence[Part], axis: int, blocks: int
) -> Weight:
    """Joined along `axis`; along the first one, each of so many blocks of the ranks' rows."""
    tensors = [part.place.value for part in found]
    shape = list(tensors[0].size)
    if len(found) > 1:
        if len(shape) <= axis or any(t.dtype != tensors[0].dtype for t in tensors):
            raise SurgeryError(
                f"{name}: its tensor-parallel parts can't be joined",
                next="join them with the converter of the trainer",
            )
        shape[axis] = sum(tensor.size[axis] for tensor in tensors)
    if not all(map(contiguous, tensors)):
        raise SurgeryError(
            f"{name}: its elements do not lie in the order of its shape",
            next="join them with the converter of the trainer",
        )
    spans: list[tuple[Path, int, int]] = []
    outer = math.prod(shape[:axis]) * blocks
    wholes = [checkpoint.span(part.place, 0, part.place.value.numel) for part in found]
    for row in range(outer):
        for file, start, end in wholes:
            length = (end - start) // outer
            spans.append((file, start + row * length, start + (row + 1) * length))
    return Weight(name, tensors[0].dtype, tuple(shape), tuple(spans))


def _partitioned(checkpoint: DeepSpeedShards) -> Iterator[Weight]:
    """Stage 3: of the fp32 masters, rank after rank."""
    masters: dict[str, list[Part]] = {}
    for part in parts.stretches(checkpoint, strict=True):
        if part.kind == "master" and part.cut != parts.UNIVERSAL:
            masters.setdefault(part.parameter, []).append(part)
    for name, found in masters.items():
        spans = tuple(checkpoint.span(part.place, part.start, part.end) for part in found)
        shape = found[0].box.whole if found[0].box is not None else ()
        yield Weight(name, found[0].place.value.dtype, shape, spans)
