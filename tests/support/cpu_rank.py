"""A rank on a CPU for megatron-core, which asks for CUDA tensors."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """CPU tensors where CUDA ones are asked for, which call themselves CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = [
                "cpu" if isinstance(each, (str, torch.device)) and "cuda" in str(each) else each
                for each in args
            ]
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        out = func(*args, **kwargs)
        asks_type = func is torch.Tensor.type and len(args) == 1 and not kwargs
        return out.replace("torch.", "torch.cuda.") if asks_type else out


def _is_cuda(device: Any) -> bool:
    """Whether it names a CUDA device, also by its number."""
    named = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return named or isinstance(device, int)


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


def end_workers() -> None:
    """Those of megatron-core's writer: a rank that was forked ends without atexit."""
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()


def cpu_parts() -> None:
    """The core's parts that would be a GPU's."""
    from megatron.core import tensor_parallel
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # which it looks for without Transformer Engine, too
    tracker = SimpleNamespace(fork=nullcontext)  # of a GPU; nothing is dropped here
    tensor_parallel.get_cuda_rng_tracker = lambda: tracker
    for module in (backends, gpt_layer_specs, transformer_block):
        for name in ("LNImpl", "LayerNormImpl", "WrappedTorchNorm"):
            if hasattr(module, name):
                setattr(module, name, Norm)


class Norm:
    """The core's torch norm in place of apex's, which is here for its Adam alone; also for tensor
    ranks that share a sequence, which the core sums the gradients of where the weight says so."""

    def __new__(cls, config: Any, **given: Any) -> Any:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        norm = WrappedTorchNorm(config=replace(config, sequence_parallel=False), **given)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
