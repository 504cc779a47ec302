"""Which kind of device computes: the one answer for torch, DeepSpeed and the kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .errors import RankError, UsageError

KINDS = ("cpu", "cuda")
DRIVER = Path("/dev/nvidiactl")
"""Where NVIDIA's driver is loaded."""


def device_kind() -> str:
    """`cuda` where torch can use a GPU, unless DS_ACCELERATOR says `cpu`; else `cpu`.

    Raises UsageError for a DS_ACCELERATOR that can't be obeyed."""
    asked = os.environ.get("DS_ACCELERATOR", "")
    if asked and asked not in KINDS:
        raise UsageError(f"DS_ACCELERATOR is {asked!r}", next="DS_ACCELERATOR=cpu or cuda")
    if asked == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise UsageError(
            f"DS_ACCELERATOR is cuda, but {unused_gpu() or 'torch finds no GPU here'}",
            next="DS_ACCELERATOR=cpu",
        )
    return "cpu"


def unused_gpu() -> str | None:
    """Why the GPU of this machine is not used, in one sentence; None where there is none."""
    if not DRIVER.exists() or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for CPUs: install the one for your CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as e:
        reason = str(e).partition("\n")[0].partition(". ")[0]
        return f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, says: {reason}"
    return f"torch {torch.__version__} does not see it (CUDA_VISIBLE_DEVICES?)"


@contextmanager
def full_memory_told() -> Iterator[None]:
    """Turn a GPU's lack of memory into an error that says what to change."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as e:
        reason = str(e).partition("\n")[0].partition(". GPU")[0]
        raise RankError(
            f"rank {os.environ.get('RANK', '0')}: the GPU has no room: {reason}",
            next=(
                "checkpoint_activations=true, or a smaller micro_batch_size",
                "or more ranks with zero_stage 1 to 3 or tensor_model_parallel_size",
            ),
            untouched="the checkpoints are as they were",
        ) from e
