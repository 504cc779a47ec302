"""The op library `torch.ops.ckptsurgeon`: schemas, plain-torch formulas, and the native code."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..device import device_kind
from ..errors import RankError, UsageError
from .build import CannotBuildError, build

MODES = ("auto", "require", "off")
FALLBACKS: dict[str, Callable[..., Any]] = {}
OLDEST_GPU = (8, 0)  # of the -gencode flags
MEASURED_GPU = (9, 0)
"""Of an H100 and an H200: the GPUs on which the trainer is measured to be faster with the layers'
kernels than without (docs/decisions/0083-the-layers-kernels-are-on-where-they-are-measured.md)."""
CHOICES: dict[str, tuple[str, ...]] = {"auto": ("cpu",), "always": ("cpu", "cuda"), "never": ()}
"""On which devices the layers' kernels compute; `auto` adds a GPU like MEASURED_GPU."""
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIBRARY = torch.library.Library("ckptsurgeon", "DEF")  # type: ignore[no-untyped-call]


def define(
    schema: str, *, fallback: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an op and return it; it loads the native code at its first call.

    `fallback` computes it in plain torch wherever no native code is loaded for a tensor's device;
    `fake` gives shapes alone, for torch.compile. The schema is here and not in C++, so that the op
    exists without a compiler.
    """
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    FALLBACKS[name] = fallback
    _LIBRARY.impl(name, fallback, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"ckptsurgeon::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.ckptsurgeon, name).default

    def call(*arguments: Any) -> Any:
        load()
        return op(*arguments)

    return call


def differentiate(
    op: Callable[..., Any], *, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The op with its gradient, from what `torch.library.register_autograd` takes.

    A Function of its own, since what torch registers for an op takes twice the time of the host.
    """

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = op(*inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    apply: Callable[..., Any] = Differentiated.apply
    return apply


def runs_natively(name: str, tensor: torch.Tensor) -> bool:
    """Whether native code computes the op for tensors like this one.

    Where it does not, a caller with a plain torch formula uses that, and torch's own gradients.
    """
    if torch.compiler.is_compiling():  # inductor fuses the formula with what is around it
        return False
    if tensor.device.type not in _chosen or load() is not None:
        return False
    if tensor.dtype not in NATIVE_DTYPES:
        return False
    return _has_native(name, tensor.device.type.upper())


def choose(kernels: str) -> None:
    """From now on the layers' kernels compute on the devices of this one of CHOICES."""
    global _chosen
    on_gpu = device_kind() == "cuda" and torch.cuda.get_device_capability() == MEASURED_GPU
    _chosen = CHOICES["always" if kernels == "auto" and on_gpu else kernels]


_chosen = CHOICES["auto"]


@cache
def _has_native(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"ckptsurgeon::{name}", key))


def check_code_for(device: str) -> None:
    """Raise CannotBuildError when what was loaded has no code for this machine's kind of device."""
    if not _has_native("adamw_flat_", device.upper()):
        raise CannotBuildError(
            f"no nvcc of CUDA {torch.version.cuda} was found (on PATH, in $CUDA_HOME, "
            "or of the wheels nvidia-cuda-nvcc and nvidia-cuda-cccl)"
        )
    if device == "cuda" and torch.cuda.get_device_capability() < OLDEST_GPU:
        raise CannotBuildError(f"{torch.cuda.get_device_name()} is older than an A100")


@cache
def load() -> str | None:
    """Load the native kernels once, built first if need be; None, or why they are not there.

    $CKPTSURGEON_KERNELS is `auto` (the default: one warning names the reason, and plain torch
    computes), `require` (RankError instead) or `off`.
    """
    mode = os.environ.get("CKPTSURGEON_KERNELS", "auto")
    if mode not in MODES:
        raise UsageError(
            f"CKPTSURGEON_KERNELS is {mode!r}; it must be {' or '.join(MODES)}",
            next="unset it for `auto`",
        )
    if mode == "off":
        return "CKPTSURGEON_KERNELS=off"
    try:
        torch.ops.load_library(str(build()))  # type: ignore[no-untyped-call]
        check_code_for(device_kind())
    except (CannotBuildError, OSError) as e:
        if mode == "require":
            raise RankError(
                f"the native kernels can't be used: {e}",
                next=(
                    "install a C++ compiler, torch 2.10 or newer and, for a GPU, nvcc of its CUDA",
                    "CKPTSURGEON_KERNELS=auto",
                ),
            ) from e
        if os.environ.get("RANK", "0") == "0":
            warnings.warn(f"kernels run in plain torch, slower: {e}", stacklevel=2)
        return str(e)
    return None
