"""The files of a checkpoint, and whether the ranks that run can load them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import TrainError
from .grid import Grid
from .pipeline import saved_layers

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")


def model_states(zero_stage: int, model: int = 0, data: int = 0) -> str:
    """The name of the file with a model rank's scheduler, counters and arguments."""
    own = f"mp_rank_{model:02d}_model_states.pt"
    return f"zero_pp_rank_{data}_{own}" if zero_stage == 3 else own


def shards(args: Any) -> Iterator[str]:
    """Every file that a checkpoint with these saved arguments must have."""
    tensor, pipeline, data = (getattr(args, size) for size in SIZES)
    prefix = "bf16_" if args.bf16 else ""  # DeepSpeed has none for fp16
    for model in range(tensor * pipeline):
        for rank in range(data if args.zero_stage == 3 else 1):
            yield model_states(args.zero_stage, model, rank)
        for rank in range(data if args.zero_stage else 0):
            yield f"{prefix}zero_pp_rank_{rank}_mp_rank_{model:02d}_optim_states.pt"
    if pipeline > 1:
        for layer in saved_layers(args.num_layers, args.untie_embeddings):
            for rank in range(tensor):
                yield f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


def missing(checkpoint: Path, args: Any) -> list[str]:
    """The names of the files that are not there."""
    return [name for name in shards(args) if not (checkpoint / name).is_file()]


def check_sizes(checkpoint: Path, args: Any, grid: Grid) -> None:
    """Raise TrainError when the checkpoint is cut for other ranks than those that run.

    Without ZeRO every data-parallel rank loads the same file, so their number is free."""
    saved = [getattr(args, size) for size in SIZES]
    own = [grid.tensor_size, grid.pipeline_size, grid.data_size]
    if saved == own or (not args.zero_stage and saved[:2] == own[:2]):
        return
    ranks = math.prod(saved)
    wanted = "".join(f" {k}={v}" for k, v in zip(SIZES[:2], saved, strict=False) if v > 1)
    raise TrainError(
        f"{checkpoint}: it is in shards for {_sizes(saved)}, but {_sizes(own)} run",
        next=(
            f"torchrun --nproc_per_node {ranks} -m train …{wanted}",
            "or python -m train universal --config …, then -m train … --universal",
        ),
        untouched="the checkpoint is as it was",
    )


def _sizes(sizes: list[int]) -> str:
    tensor, pipeline, data = sizes
    total = math.prod(sizes)
    ranks = f"{total} rank{'' if total == 1 else 's'}"
    if tensor * pipeline == 1:
        return ranks
    return f"{ranks} (tensor {tensor} x pipeline {pipeline} x data {data})"
