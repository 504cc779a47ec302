"""One row of the parity table: an op, what it is called with, and its formula in float64."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from train.kernels.library import FALLBACKS, load

BACKENDS = ("fallback", "cpu", "cuda")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """`inputs(shape, dtype, seed)` gives the arguments in the order of the schema. `reference`
    gets them, floating tensors as float64, and returns what the op must return; it changes the
    arguments numbered in `mutated` itself, and they are compared too. `tolerance` is relative to
    the largest element of a result."""

    op: str
    shapes: Sequence[Shape]
    dtypes: Sequence[torch.dtype]
    inputs: Callable[[Shape, torch.dtype, int], list[Any]]
    reference: Callable[..., Sequence[Tensor]]
    mutated: Sequence[int] = ()
    tolerance: dict[torch.dtype, float] = field(
        default_factory=lambda: {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
    )


def skip_without(backend: str) -> str:
    """The device of this backend; skips the test, with the reason, where it is not there."""
    if backend == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if backend != "fallback" and (reason := load()) is not None:
        pytest.skip(f"no native kernels: {reason}")
    return "cuda" if backend == "cuda" else "cpu"


def native(op: str, device: str) -> bool:
    """Whether native code, not the formula in torch, computes this op on this device."""
    name = f"ckptsurgeon::{op}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper()))


def call(op: str, backend: str, arguments: Sequence[Any]) -> list[Tensor]:
    """What the op returns on this backend, as a list; fails if something else would compute it."""
    device = skip_without(backend)
    arguments = moved(arguments, device)
    if backend == "fallback":
        result = FALLBACKS[op](*arguments)
    else:
        assert native(op, device)
        result = getattr(torch.ops.ckptsurgeon, op)(*arguments)
    return [result] if isinstance(result, Tensor) else list(result)


def moved(arguments: Sequence[Any], device: str) -> list[Any]:
    """The tensors on this device; a seed (one int64) stays on the host, where it is drawn."""

    def one(a: Any) -> Any:
        if isinstance(a, list):
            return [one(item) for item in a]
        return a.to(device) if isinstance(a, Tensor) and (a.ndim or a.is_floating_point()) else a

    return [one(argument) for argument in arguments]


def wide(argument: Any) -> Any:
    """A floating tensor as float64, anything else as it is; never the same storage."""
    if isinstance(argument, list):
        return [wide(item) for item in argument]
    if not isinstance(argument, Tensor):
        return argument
    return argument.double() if argument.is_floating_point() else argument.clone()


def clone(argument: Any) -> Any:
    if isinstance(argument, list):
        return [clone(item) for item in argument]
    return argument.clone() if isinstance(argument, Tensor) else argument


def each(arguments: Sequence[Any], numbers: Sequence[int]) -> list[Tensor]:
    """The arguments of these numbers, those of a list one by one."""
    chosen = (arguments[number] for number in numbers)
    return [item for a in chosen for item in (a if isinstance(a, list) else [a])]


def assert_close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    """No element is off by more than `tolerance` times the largest one; nan only where nan."""
    assert ours.shape == exact.shape
    scale = float(exact.abs().max()) if exact.numel() else 1.0
    torch.testing.assert_close(
        ours.detach().cpu().double(), exact.double(), rtol=0, atol=tolerance * max(scale, 1e-30)
    )


def check(case: Case, dtype: torch.dtype, backend: str, laid: Callable[[Any], Any]) -> str:
    """The op gives what its formula gives, in every shape; `laid` puts an argument into memory.
    Returns a digest of the bits of all results."""
    device = skip_without(backend)
    digest = hashlib.sha256()
    for shape in case.shapes:
        arguments = case.inputs(shape, dtype, 1)
        exact = [wide(argument) for argument in arguments]
        expected = [*case.reference(*exact), *each(exact, case.mutated)]
        ours = moved([laid(argument) for argument in arguments], device)
        results = [*call(case.op, backend, ours), *each(ours, case.mutated)]
        for result, wanted in zip(results, expected, strict=True):
            assert_close(result, wanted, case.tolerance[dtype])
            digest.update(result.detach().cpu().double().numpy().tobytes())
    return digest.hexdigest()
