"""A rank on a CPU for megatron-core, which asks for CUDA tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """CPU tensors where CUDA ones are asked for, which call themselves CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        asks_type = func is torch.Tensor.type and len(args) == 1 and not kwargs
        return out.replace("torch.", "torch.cuda.") if asks_type else out


@contextmanager
def cpu_rank() -> Iterator[None]:
    """The process group of the launch, or of this process alone, and CPU tensors in place of CUDA
    ones."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    else:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with OnCpu():
        yield
    dist.destroy_process_group()
