"""Times one kernel of the layers and its eager formula in turn; prints seconds as JSON.

Usage: python -m bench.layer_times NAME ROUNDS   or   … memory eager|ours
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from train.kernels import (
    bias_dropout_add_layer_norm,
    bias_gelu,
    causal_softmax,
    linear_cross_entropy,
    load,
)

Formula = Callable[..., Tensor | tuple[Tensor, ...]]


def pass_of(
    formula: Formula, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> Callable[[], None]:
    """One forward and backward of the formula, with these gradients of its results."""

    def run() -> None:
        for tensor in inputs:
            tensor.grad = None
        result = formula(*inputs)
        torch.autograd.backward(result, list(grads) or None)

    return run


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).requires_grad_()


def gelu(rows: int) -> tuple[Formula, Formula, list[Tensor], list[Tensor]]:
    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    return eager, bias_gelu, [random(rows, 1024), random(1024)], [torch.randn(rows, 1024)]


def add_norm(rows: int, p: float = 0.0) -> tuple[Formula, Formula, list[Tensor], list[Tensor]]:
    def eager(
        x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
    ) -> tuple[Tensor, ...]:
        s = residual + F.dropout(x + bias, p)
        return F.layer_norm(s, (1024,), weight, shift, 1e-5), s

    def ours(
        x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor
    ) -> tuple[Tensor, ...]:
        return bias_dropout_add_layer_norm(x, bias, residual, weight, shift, 1e-5, p)

    x, residual = random(rows, 1024), random(rows, 1024)
    inputs = [x, random(1024), residual, random(1024), random(1024)]
    return eager, ours, inputs, [torch.randn(rows, 1024), torch.randn(rows, 1024)]


def loss() -> tuple[Formula, Formula, list[Tensor], list[Tensor]]:
    targets = torch.randint(50304, (2048,))
    inputs = [random(2048, 512), random(50304, 512, scale=0.02)]

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), targets)

    return eager, lambda x, weight: linear_cross_entropy(x, weight, targets), inputs, []


def softmax(*shape: int) -> tuple[Formula, Formula, list[Tensor], list[Tensor]]:
    future = torch.ones(shape[-2:], dtype=torch.bool).triu(1)
    scores = [random(*shape)]

    def eager(x: Tensor) -> Tensor:
        return (x * 0.125).masked_fill(future, -10000.0).softmax(-1)

    return eager, lambda x: causal_softmax(x, 0.125), scores, [torch.randn(shape)]


Subject = tuple[Formula, Formula, list[Tensor], list[Tensor]]
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "bias_gelu": lambda: gelu(1024),
    "bias_gelu-large": lambda: gelu(8192),
    "add_norm": lambda: add_norm(1024),
    "add_norm-large": lambda: add_norm(8192),
    "add_norm-dropout": lambda: add_norm(1024, 0.1),
    "loss": loss,
    "softmax": lambda: softmax(4, 4, 256, 256),
    "softmax-long": lambda: softmax(2, 8, 1024, 1024),
}


def main() -> None:
    name, argument = sys.argv[1:]
    if (reason := load()) is not None:
        sys.exit(f"no native kernels: {reason}")
    if name == "memory":
        print(json.dumps({"mb": peak_of_loss(argument)}))
        return
    eager, ours, inputs, grads = SUBJECTS[name]()
    passes = {"eager": pass_of(eager, inputs, grads), "ours": pass_of(ours, inputs, grads)}
    times: dict[str, list[float]] = {kind: [] for kind in passes}
    for turn in range(int(argument) + 1):
        for kind, run in passes.items():
            began = time.perf_counter()
            run()
            if turn:  # the first one warms up
                times[kind].append(time.perf_counter() - began)
    print(json.dumps(times))


def peak_of_loss(kind: str) -> float:
    """How far one pass of the loss takes the memory of this process above that of its inputs."""
    eager, ours, inputs, grads = loss()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pass_of(eager if kind == "eager" else ours, inputs, grads)()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    main()
