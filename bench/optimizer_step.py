"""Times one optimizer step over a flat tensor, from scaled gradients to bf16 weights, in a process
of its own: `python -m bench.optimizer_step ELEMENTS ROUNDS` prints CPU seconds as JSON.

Everything that a step of fp16 or bf16 training does is counted on both sides: unscale, look for
inf and nan, norm, clip, AdamW, copy to bf16, and the l1 norm and maximum of Adam's variance. The
others get their fastest calls: `torch.optim.AdamW(fused=True)`, and DeepSpeedCPUAdam.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.pairs import seconds
from train.kernels import adamw_flat_, grad_norm_check, load
from train.kernels.build import CXX_FLAGS, find_toolchain

SCALE = 65536.0
CLIP = 1.0
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def main(elements: int, rounds: int) -> None:
    reason = load()
    assert reason is None, reason
    torch.set_num_threads(1)
    torch.manual_seed(1)
    gradient = torch.randn(elements).mul_(1e-3 * SCALE)
    bf16 = gradient.bfloat16()
    weights = torch.randn(elements).mul_(0.02)
    times: dict[str, Any] = {"bytes": gradient.nbytes}
    steps = {
        "torch": separate_step(weights, gradient, fused_adamw(weights)),
        "deepspeed": separate_step(weights, gradient, deepspeed_adam(weights)),
        "ours": one_pass(weights, gradient),
        "ours, bf16 gradients": one_pass(weights, bf16),
    }
    times |= seconds(steps, rounds)
    norms = {
        "read": read_probe(gradient),
        "norm, torch": lambda: separate_norm(gradient),
        "norm, deepspeed": lambda: deepspeed_norm(gradient),
        "norm, ours": lambda: grad_norm_check([gradient]).tolist(),
    }
    times |= seconds(norms, 5 * rounds)
    print(json.dumps(times))


def read_probe(tensor: Tensor) -> Callable[[], object]:
    """A read of these bytes, as fast as the machine reads, by one thread."""
    source = Path(__file__).with_name("read_bandwidth.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/probe.so"
        command = [find_toolchain().cxx, *CXX_FLAGS, "-funroll-loops", "-shared"]
        subprocess.run([*command, str(source), "-o", library], check=True)
        read_all = ctypes.CDLL(library).read_all
    pointer, words = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes // 8)
    return lambda: read_all(pointer, words)


def separate_norm(gradient: Tensor) -> tuple[bool, float]:
    """The fastest that torch gives: one pass looks for inf and nan, another takes the norm."""
    finite = bool(torch.isfinite(gradient.sum()))
    return finite, float(gradient.norm())


def deepspeed_norm(gradient: Tensor) -> tuple[bool, float]:
    """`has_overflow` and `get_grad_norm_direct` of `deepspeed/runtime/zero/stage_1_and_2.py`."""
    from deepspeed.runtime.utils import has_inf_or_nan
    from deepspeed.runtime.zero.utils import get_norm_dtype

    norm = torch.linalg.vector_norm(gradient.to(get_norm_dtype()))
    return bool(has_inf_or_nan(gradient)), float(norm)


def fused_adamw(weights: Tensor) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(weights.clone())], fused=True, **HYPER)


def deepspeed_adam(weights: Tensor) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: torch.optim.Optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(weights.clone())], **HYPER)
    return made


def separate_step(
    weights: Tensor, gradient: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[], object]:
    """In passes of their own; the gradient is unscaled into a buffer, so that every round sees the
    same one."""
    unscaled, out = torch.empty_like(gradient), torch.empty_like(weights, dtype=torch.bfloat16)
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = unscaled

    def step() -> object:
        torch.mul(gradient, 1 / SCALE, out=unscaled)
        finite, norm = separate_norm(unscaled)
        assert finite
        unscaled.mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        out.copy_(parameter.detach())
        variance = optimizer.state[parameter]["exp_avg_sq"]
        return float(variance.norm(1)), float(variance.max())

    return step


def one_pass(weights: Tensor, gradient: Tensor) -> Callable[[], object]:
    p, m, v = weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)
    out = torch.empty_like(weights, dtype=torch.bfloat16)

    def step() -> object:
        ((squared, nonfinite),) = grad_norm_check([gradient]).tolist()
        assert not nonfinite
        norm = squared**0.5 / SCALE
        multiplier = torch.tensor(min(1.0, CLIP / (norm + 1e-6)) / SCALE)
        return adamw_flat_([p], [m], [v], [gradient], [out], multiplier, step=1, **HYPER).tolist()

    return step


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
