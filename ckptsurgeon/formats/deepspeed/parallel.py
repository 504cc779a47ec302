"""How a DeepSpeed checkpoint is cut over tensor, pipeline and data ranks, and which layer files a
pipeline must have.

A model rank, `mp_rank_<MM>`, is pipeline rank x tensor size + tensor rank
(`deepspeed/runtime/pipe/topology.py`). A PipelineModule keeps its weights in one file for each
layer and tensor rank, and None as `module` in the model files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.formats.fields.understood import is_count
from ckptsurgeon.formats.fields.values import Box
from ckptsurgeon.plans.frozen import frozen

LAYER = re.compile(r"layer_(\d{2,})(?:-model_(\d{2,}))?-model_states\.pt")
EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
RANK = re.compile(r"mp_rank_(\d+)")
ROWS = re.compile(
    r"(word_embeddings|query_key_value|dense_h_to_4h|lm_head|(^|\.)head)\.(weight|bias)$"
)
"""Cut along axis 0: Megatron's vocabulary- and column-parallel parameters."""
COLUMNS = re.compile(r"(\.|^)(dense|dense_4h_to_h)\.weight$")
"""Cut along axis 1: its row-parallel ones."""
WHOLE = re.compile(
    r"norm|(\.|^)ln_|_embeddings\.weight$|(\.|^)(dense|dense_4h_to_h)\.bias$|(\.|^)gate\.wg\."
    r"|^(\d+\.)?(weight|bias)$"
)
"""Whole on each rank: norms, positions, biases of row-parallel ones, routers; a layer of a pipeline
that is one module alone."""
GATED = re.compile(r"(\.|^)dense_h_to_4h\.(weight|bias)$")
"""Under SwiGLU the rows of the gate and those beside it, of which each rank has both."""
MAX_LAYERS = 4096
"""Of a model; a list of file names is made of it."""


@frozen
class Sizes:
    """Ranks along each axis. `tensor` is None where a file of several model ranks does not tell
    how many of them are tensor ranks."""

    tensor: int | None
    pipeline: int | None
    data: int

    def __str__(self) -> str:
        known = (("tp", self.tensor), ("pp", self.pipeline))
        words = [f"{name} {size}" for name, size in known if size and size > 1]
        return " · ".join([*words, f"dp {self.data}"])


def sizes(tree: Mapping[str, Any]) -> Sizes:
    """By DeepSpeed's own `checkpoint_parallel_dimensions` (from 0.19 on), else by Megatron's
    arguments; a size that does not divide `mp_world_size` is not believed."""
    data, model = int(tree.get("dp_world_size", 1)), int(tree.get("mp_world_size", 1))
    own = tree.get("checkpoint_parallel_dimensions")
    tensor = own.get("tp_degree") if isinstance(own, Mapping) else None
    if tensor is None:
        tensor = _argument(tree, "tensor_model_parallel_size")
    if tensor is None and model == 1:
        tensor = 1
    if not is_count(tensor) or tensor == 0 or model % tensor:
        return Sizes(None, None, data)
    return Sizes(tensor, model // tensor, data)


def model_rank(name: str) -> int:
    """By the name of a file; 0 where it has none."""
    match = RANK.search(name)
    return int(match[1]) if match else 0


def axis(name: str) -> int | None:
    """The axis that tensor ranks cut a parameter along; None where each of them has all of it."""
    return 0 if ROWS.search(name) else 1 if COLUMNS.search(name) else None


def tensor_ranks(models: Mapping[Path, Mapping[str, Any]]) -> int:
    """How many there are, by the model files; all model ranks, where no file tells which of them
    are."""
    known = sizes(next(iter(models.values()))).tensor
    return known or 1 + max(model_rank(path.name) for path in models)


@frozen
class TensorRank:
    """One of so many, and whether the model is `gated`, as by SwiGLU."""

    number: int
    ranks: int
    gated: bool = False


def is_gated(tree: Mapping[str, Any]) -> bool:
    """By Megatron's arguments."""
    return bool(_argument(tree, "swiglu"))


def box(name: str, size: tuple[int, ...], tensor: TensorRank) -> Box | None:
    """What a tensor rank has of a parameter, by the size that it has there; None for names that are
    not Megatron's, and for rows that are no block of the parameter."""
    rank, ranks = tensor.number, tensor.ranks
    if ranks == 1:
        return Box.all(size)
    cut = axis(name)
    if cut is None:
        return Box.all(size, replica=True) if WHOLE.search(name) else None
    if len(size) <= cut or (tensor.gated and GATED.search(name)):
        return None
    whole, offset = [*size], [0] * len(size)
    whole[cut], offset[cut] = size[cut] * ranks, size[cut] * rank
    return Box(tuple(whole), tuple(offset), size)


def absent_layers(names: Collection[str], tree: Mapping[str, Any]) -> list[str]:
    """Layer files that are not there, as far as a model file and the other layers tell.

    Layer numbers may have gaps, since a layer without weights is not saved; the bundled trainer's
    have none, and its files are known from its arguments."""
    matches = [match for name in sorted(names) if (match := LAYER.fullmatch(name))]
    layers = {int(match[1]) for match in matches} | _named(tree) | _of_bundled_trainer(tree)
    if any(match[2] is None for match in matches):  # a topology without tensor ranks
        files = [f"layer_{layer:02d}-model_states.pt" for layer in sorted(layers)]
    else:
        highest = max((int(match[2]) for match in matches), default=0)
        tensor = max(sizes(tree).tensor or 1, min(highest, MAX_LAYERS) + 1)
        files = [_file(layer, rank) for layer in sorted(layers) for rank in range(tensor)]
    return [name for name in files if name not in names]


def contradictions(models: Mapping[Path, Mapping[str, Any]]) -> Iterator[str]:
    """Layers that a model rank's parameters are in and that have no file; sizes that can't be."""
    for path, tree in models.items():
        own, model = tree.get("checkpoint_parallel_dimensions"), tree.get("mp_world_size", 1)
        if isinstance(own, Mapping):
            degrees = [own.get(key, 1) for key in ("tp_degree", "pp_degree")]
            if all(map(is_count, degrees)) and degrees[0] * degrees[1] != model:
                yield (
                    f"{path.name}: tensor {degrees[0]} x pipeline {degrees[1]} is not its "
                    f"mp_world_size {model}"
                )
        tensor = sizes(tree).tensor
        rank = re.search(r"mp_rank_(\d+)", path.name)
        if tensor is None or rank is None or disk.is_folder(path.parent / "zero"):
            continue  # in a universal copy the weights lie in zero/
        for layer in sorted(_named(tree)):
            name = _file(layer, int(rank[1]) % tensor)
            plain = path.with_name(f"layer_{layer:02d}-model_states.pt")
            if not disk.exists(path.with_name(name)) and not disk.exists(plain):
                yield f"{name} is missing: {path.name} has parameters in layer {layer}"


def _file(layer: int, rank: int) -> str:
    return f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


def _named(tree: Mapping[str, Any]) -> set[int]:
    """The layers that this rank's parameters are named after, in a pipeline under ZeRO."""
    shapes = tree.get("param_shapes")
    if tree.get("module", 0) is not None or not isinstance(shapes, (list, tuple)):
        return set()
    names = (name for group in shapes if isinstance(group, Mapping) for name in group)
    numbers = (re.match(r"(\d{1,5})\.", name) for name in names if isinstance(name, str))
    return {int(number[1]) for number in numbers if number}


def _of_bundled_trainer(tree: Mapping[str, Any]) -> set[int]:
    """Word embeddings, positions, blocks, the final LayerNorm and, when untied, the head."""
    count = _argument(tree, "num_layers")
    if tree.get("module", 0) is not None or tree.get("trainer") != "ckptsurgeon":
        return set()
    if not is_count(count) or count > MAX_LAYERS:
        return set()
    return set(range(count + 3 + bool(_argument(tree, "untie_embeddings"))))


def _argument(tree: Mapping[str, Any], name: str) -> Any:
    state = getattr(tree.get("args"), "state", None)
    return state.get(name) if isinstance(state, Mapping) else None
