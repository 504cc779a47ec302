"""Which rank does what: the tensor, data and pipeline coordinates of this process.

Ranks are numbered as Megatron numbers them: tensor fastest, then data, then pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from .config import Config
from .errors import UsageError


@dataclass(frozen=True)
class Grid:
    """The place of one rank. `mpu` is DeepSpeed's object with the process groups, None when the
    run is only data-parallel."""

    tensor_size: int = 1
    pipeline_size: int = 1
    data_size: int = 1
    tensor_rank: int = 0
    pipeline_rank: int = 0
    data_rank: int = 0
    mpu: Any = None

    @property
    def model_size(self) -> int:
        """The ranks that share one copy of the weights: DeepSpeed's mp_world_size."""
        return self.tensor_size * self.pipeline_size

    @property
    def tensor_group(self) -> Any:
        """The ranks that hold slices of the same matrices."""
        return None if self.mpu is None else self.mpu.get_slice_parallel_group()

    @property
    def model_group(self) -> Any:
        """The ranks that share one copy of the weights."""
        return None if self.mpu is None else self.mpu.get_model_parallel_group()

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the one that counts a parameter which other ranks may hold too."""
        if getattr(parameter, "ds_pipe_replicated", False):  # the last stage's copy of a tied one
            return False
        return self.tensor_rank == 0 or hasattr(parameter, "partition_dim")

    def sum_over_stages(self, count: int) -> int:
        """The sum of `count` over the pipeline stages; every rank must call it."""
        if self.pipeline_size == 1:
            return count
        total = torch.tensor(count, device=get_accelerator().current_device_name())
        dist.all_reduce(total, group=self.mpu.get_pipe_parallel_group())
        return int(total)


ALONE = Grid()


def arrange(config: Config, ranks: int) -> Grid:
    """The grid of `ranks` processes; joins its process groups, so every rank must call it.

    Raises UsageError when the ranks can't be shared out evenly."""
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if ranks % (tensor * pipeline):
        raise UsageError(
            f"{ranks} ranks run, but tensor_model_parallel_size {tensor} x "
            f"pipeline_model_parallel_size {pipeline} needs a multiple of {tensor * pipeline}",
            next=f"torchrun --nproc_per_node {tensor * pipeline} -m train …",
        )
    data = ranks // (tensor * pipeline)
    if tensor * pipeline == 1:
        return Grid(data_size=data, data_rank=dist.get_rank())
    mpu = PipelineParallelGrid(PipeModelDataParallelTopology(pipeline, tensor, data))
    return Grid(
        tensor_size=tensor,
        pipeline_size=pipeline,
        data_size=data,
        tensor_rank=mpu.get_slice_parallel_rank(),
        pipeline_rank=mpu.get_pipe_parallel_rank(),
        data_rank=mpu.get_data_parallel_rank(),
        mpu=mpu,
    )
