"""FSDP of fairscale on CPUs: it asks for streams of a GPU, which are nothing here, and hands gloo
rows where NCCL takes any shape."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import torch
import torch.distributed


class Stream:
    """Of a device whose work is done when it was asked for."""

    def wait_stream(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


STREAM = Stream()


def on_cpus() -> None:
    """To be called before an FSDP is made."""
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as fsdp

    fsdp._get_default_cuda_device = lambda _: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: STREAM  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment, misc, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    torch.Tensor.cpu = lambda self, *_, **__: self.clone()  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    reset = fsdp.FullyShardedDataParallel._reset_lazy_init
    free = fsdp.FullyShardedDataParallel._free_full_params

    def without_streams(self: Any) -> None:
        reset(self)
        self._streams = collections.defaultdict(lambda: STREAM)

    def once_there(self: Any, params: Any = None) -> None:
        """Before its first update, where 0.4.13 frees what a load never made."""
        if all(hasattr(each, "_full_param_padded") for each in params or self.params):
            free(self, params)

    fsdp.FullyShardedDataParallel._reset_lazy_init = without_streams
    fsdp.FullyShardedDataParallel._free_full_params = once_there
    scatter = torch.distributed._reduce_scatter_base

    def of_rows(output: Any, input: Any, *args: Any, **options: Any) -> Any:
        return scatter(output.view(-1), input.reshape(-1), *args, **options)

    torch.distributed._reduce_scatter_base = of_rows
