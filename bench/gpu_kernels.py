"""Each kernel against its peers on one device: CUDA events, a cold L2. One JSON object a line.

Usage: python -m bench.gpu_kernels [--small|--once]   (--once: ours twice each, for a profiler)
Peers: eager torch, torch.compile, Liger where it is installed, the backends of torch's attention,
and torch's fused AdamW with what it lacks.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from train.device import device_kind
from train.kernels import (
    adamw_flat_,
    bias_dropout_add_layer_norm,
    bias_gelu,
    causal_softmax,
    choose,
    grad_norm_check,
    linear_cross_entropy,
    load,
)

SMALL, ONCE = "--small" in sys.argv, "--once" in sys.argv
DEVICE = torch.device(device_kind())
HIDDEN, TOKENS, LENGTH, HEADS = (64, 128, 32, 2) if SMALL else (2048, 16384, 2048, 16)
VOCABULARY = 512 if SMALL else 50304
HYPER: dict[str, Any] = {
    "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 5,
}  # fmt: skip
Formula = Callable[..., Any]


def milliseconds(function: Callable[[], object], rounds: int = 20) -> float:
    """The median of some calls."""
    if ONCE:
        function()
        function()
        return 0.0
    for _ in range(1 if SMALL else 5):
        function()
    if DEVICE.type == "cpu":
        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e3
    cold = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)  # larger than any L2
    times: list[float] = []
    for _ in range(rounds):
        cold.zero_()
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(torch.bfloat16).requires_grad_()


def both_ways(formula: Formula, inputs: Sequence[Tensor], grads: Sequence[Tensor] | None) -> Any:
    """One forward and backward pass of a formula."""

    def run() -> None:
        for tensor in inputs:
            tensor.grad = None
        torch.autograd.backward(formula(*inputs), grads)

    return run


def timed(
    what: str, inputs: Sequence[Tensor], grads: Any, who: dict[str, Formula]
) -> dict[str, Any]:
    """Milliseconds and GiB of each; what fails is quoted, and the others are still measured."""
    line: dict[str, Any] = {"what": what, "ms": {}, "gib": {}, "failed": {}}
    for name, formula in who.items():
        if (SMALL and "compile" in name) or (ONCE and name != "ours"):
            continue
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            line["ms"][name] = milliseconds(both_ways(formula, inputs, grads))
        except Exception as e:
            line["failed"][name] = str(e).partition("\n")[0][:200]
            continue
        if DEVICE.type == "cuda":
            line["gib"][name] = torch.cuda.max_memory_allocated() / 2**30
    return line


def layers() -> Iterator[dict[str, Any]]:
    def gelu(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    x = leaf(TOKENS, 4 * HIDDEN)
    who: dict[str, Formula] = {"ours": bias_gelu, "eager": gelu, "compile": torch.compile(gelu)}
    yield timed("bias_gelu", [x, leaf(4 * HIDDEN)], [torch.randn_like(x)], who)
    for p in (0.0, 0.1):

        def norm(x: Tensor, b: Tensor, r: Tensor, w: Tensor, s: Tensor, p: float = p) -> Any:
            total = r + F.dropout(x + b, p)
            return F.layer_norm(total, (HIDDEN,), w, s, 1e-5), total

        def ours(x: Tensor, b: Tensor, r: Tensor, w: Tensor, s: Tensor, p: float = p) -> Any:
            return bias_dropout_add_layer_norm(x, b, r, w, s, 1e-5, p)

        x = leaf(TOKENS, HIDDEN)
        inputs = [x, leaf(HIDDEN), leaf(TOKENS, HIDDEN), leaf(HIDDEN), leaf(HIDDEN)]
        who = {"ours": ours, "eager": norm, "compile": torch.compile(norm)}
        grads = [torch.randn_like(x), torch.randn_like(x)]
        yield timed(f"bias_dropout_add_layer_norm, dropout {p}", inputs, grads, who)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).triu(1)

    def softmax(scores: Tensor) -> Tensor:
        return (scores * 0.1).masked_fill(future, -1e4).softmax(-1)

    scores = leaf(2, HEADS, LENGTH, LENGTH)
    who = {
        "ours": lambda s: causal_softmax(s, 0.1),
        "eager": softmax,
        "compile": torch.compile(softmax),
    }
    yield timed("causal_softmax", [scores], [torch.randn_like(scores)], who)


def loss() -> Iterator[dict[str, Any]]:
    targets = torch.randint(VOCABULARY, (TOKENS,), device=DEVICE)

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    who: dict[str, Formula] = {
        "ours": lambda x, w: linear_cross_entropy(x, w, targets),
        "eager": whole,
        "compile": torch.compile(whole),
    }
    if hasattr(F, "linear_cross_entropy"):
        who["torch's own"] = lambda x, w: F.linear_cross_entropy(x, w, targets)
    try:
        from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
            liger_fused_linear_cross_entropy,
        )

        def liger(x: Tensor, w: Tensor) -> Any:
            told = liger_fused_linear_cross_entropy(x, w, targets)
            return told[0] if isinstance(told, tuple) else told

        who["Liger"] = liger
    except ImportError:
        pass
    weight = leaf(VOCABULARY, HIDDEN, scale=0.02)
    yield timed("linear_cross_entropy", [leaf(TOKENS, HIDDEN), weight], None, who)


def attention() -> dict[str, Any]:
    def with_backend(backend: SDPBackend | None) -> Formula:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    inputs = [leaf(TOKENS // LENGTH, HEADS, LENGTH, HIDDEN // HEADS) for _ in range(3)]
    who = {
        "torch's choice": with_backend(None),
        "flash": with_backend(SDPBackend.FLASH_ATTENTION),
        "cuDNN": with_backend(SDPBackend.CUDNN_ATTENTION),
        "efficient": with_backend(SDPBackend.EFFICIENT_ATTENTION),
    }
    return timed("attention", inputs, [torch.randn_like(inputs[0])], who)


def optimizer(what: str, sizes: Sequence[int]) -> dict[str, Any]:
    """One step from scaled bf16 gradients to bf16 weights, of so many tensors."""
    ps = [torch.randn(n, device=DEVICE) for n in sizes]
    ms, vs = [torch.zeros_like(p) for p in ps], [torch.zeros_like(p) for p in ps]
    gs = [torch.randn_like(p).to(torch.bfloat16) for p in ps]
    outs = [torch.empty_like(g) for g in gs]

    def ours() -> None:
        squared = grad_norm_check(gs).sum(0)[0]
        mul = (1 / (squared.sqrt() + 1e-6)).clamp(max=1.0).float()
        adamw_flat_(ps, ms, vs, gs, outs, mul, **HYPER)

    parameters = [torch.nn.Parameter(p.clone()) for p in ps]
    stock = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def theirs() -> None:
        for parameter, g in zip(parameters, gs, strict=True):
            parameter.grad = g.float()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        stock.step()
        torch._foreach_copy_(outs, [p.detach() for p in parameters])

    line: dict[str, Any] = {"what": what, "ms": {"ours": milliseconds(ours, 10)}}
    if ONCE:
        return line
    line["ms"]["clip, fused AdamW and copy"] = milliseconds(theirs, 10)
    if DEVICE.type == "cuda":
        line["share of copy"] = 32 * sum(sizes) / line["ms"]["ours"] * 1e3 / copy_bandwidth()
    return line


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a plain copy."""
    source = torch.empty(2**20 if SMALL else 2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def main() -> None:
    if (reason := load()) is not None:
        sys.exit(f"no native kernels: {reason}")
    choose("always")
    if not ONCE:
        print(json.dumps({"what": "copy", "bytes_per_second": copy_bandwidth()}), flush=True)
    h, scale = HIDDEN, 10**5 if SMALL else 4 * 10**8
    layer = [3 * h * h, h * h, 4 * h * h, 4 * h * h, 3 * h, h, 4 * h, h, h, h, h, h]
    pieces = [VOCABULARY * h, LENGTH * h, *(layer * (2 if SMALL else 24))]
    print(json.dumps(optimizer("optimizer step, flat", [scale])), flush=True)
    print(json.dumps(optimizer("optimizer step, of 24 layers' parameters", pieces)), flush=True)
    for line in layers():
        print(json.dumps(line), flush=True)
    for line in loss():
        print(json.dumps(line), flush=True)
    if not ONCE:
        print(json.dumps(attention()), flush=True)


if __name__ == "__main__":
    main()
