"""Ranks: the launch environment, the process group, the teardown."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from typing import Any, NoReturn

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def complete_environment() -> None:
    """Without a launcher, make this process rank 0 of 1; port 0 is any that is free, chosen when
    the group is joined: one that was free before the imports may not be free after them."""
    if "RANK" not in os.environ:
        values = ("0", "1", "0", "127.0.0.1", "0")
        os.environ.update(zip(RANK_VARIABLES, values, strict=True))


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def start(threads: int) -> Any:
    """Join the process group (NCCL with a GPU, else gloo) and return torch's device."""
    import torch

    from .device import device_kind, unused_gpu

    torch.set_num_threads(threads)
    if hasattr(torch.compiler, "set_default_backend"):
        # DeepSpeed decorates an optimizer that is not used here with torch.compile; the default
        # backend would import the whole inductor for it.
        torch.compiler.set_default_backend("eager")
    kind = os.environ["DS_ACCELERATOR"] = device_kind()
    on_gpu = kind == "cuda"
    if not on_gpu and rank() == 0 and (reason := unused_gpu()) is not None:
        warnings.warn(f"the GPU of this machine is not used: {reason}", stacklevel=2)
    import deepspeed

    # DeepSpeed still calls the old name; nothing that a user of the trainer can act on.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    if on_gpu:
        torch.cuda.set_device(local_rank())
    else:
        # On a CPU DeepSpeed would compile its shared-memory all-reduce at the first start (40 s,
        # a compiler needed). Only inference calls that op; this table says "not available" of all.
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)
    return torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")


def gather(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank."""
    import torch.distributed as dist

    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def confirmed() -> bool:
    """Whether rank 0 reads `go` on stdin; every rank gets its answer."""
    import sys

    answer = sys.stdin.readline().strip() == "go" if rank() == 0 else None
    return bool(gather(answer)[0])


def finish() -> NoReturn:
    """Leave together, with status 0.

    The interpreter's own teardown is skipped: with several ranks gloo's threads were seen to
    abort it after everything had been saved.
    """
    import sys

    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
