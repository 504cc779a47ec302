"""The rows of the parity table for the kernels of the model's layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.kernels.case import Case, Shape

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# No row, one element, less and more than a vector, more rows than blocks of them, longer rows than
# a GPU's block has threads, and than its threads keep.
ROWS = ((0, 5), (1, 1), (7, 63), (2, 3, 130), (5, 132), (197, 17), (3, 1032), (2, 8216))
# The norm of a row of one is constant: its gradient is 0 exactly, and there is nothing to compare.
NORMED = tuple((1, 3) if shape == (1, 1) else shape for shape in ROWS)
SCORES = (
    (0, 1, 1),
    (2, 1, 1),
    (1, 0, 5),
    (2, 3, 7, 7),
    (2, 3, 130),
    (2, 65, 65),
    (3, 517),
    (2, 8216),
)
EPS = 1e-5
# Two roundings of a 16-bit format on the way of a result, and sums over 197 rows.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def normal(shape: Shape, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def gradients(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Torch's own gradients of a formula in float64."""
    found = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs, strict=True)]


def _bias_gelu(x: Tensor, bias: Tensor) -> list[Tensor]:
    return [F.gelu(x + bias, approximate="tanh")]


def _bias_gelu_inputs(shape: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
    return [normal(shape, dtype, seed, 3.0), normal(shape[-1:], dtype, seed + 1)]


def _bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> list[Tensor]:
    inputs = [x.requires_grad_(), bias.requires_grad_()]
    return gradients(_bias_gelu(*inputs), inputs, [grad])


def _dropout_add(p: float) -> tuple[Any, Any]:
    """The inputs of both directions of K4 with this share dropped."""

    def forward(shape: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
        vectors = [normal(shape[-1:], dtype, seed + i) for i in range(3)]
        x, residual = normal(shape, dtype, seed + 3), normal(shape, dtype, seed + 4)
        mask = torch.tensor(2**32 + seed) if p else None
        return [x, vectors[0], residual, vectors[1], vectors[2], EPS, p, mask]

    def backward(shape: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
        total = normal(shape, dtype, seed, 2.0)
        stats = row_stats(total.float())
        mask = torch.tensor(seed) if p else None
        grads = [normal(shape, dtype, seed + 1), normal(shape, dtype, seed + 2)]
        return [*grads, total, stats, normal(shape[-1:], dtype, seed + 3), p, mask]

    return forward, backward


def row_stats(total: Tensor) -> Tensor:
    """Mean and 1 / standard deviation of each row, [rows, 2]."""
    rows = total.flatten(0, -2)
    mean = rows.mean(1, keepdim=True)
    return torch.cat((mean, torch.rsqrt((rows - mean).square().mean(1, keepdim=True) + EPS)), 1)


def kept(like: Tensor, p: float, seed: Tensor | None) -> Tensor | float:
    """The factor of each element, by Philox in Python's own integers."""
    if seed is None:
        return 1.0
    columns = like.shape[-1]
    half = (columns + 1) // 2
    words = []
    for row in range(like.numel() // max(columns, 1)):
        pairs = [philox2x32(column, row, int(seed) % 2**32) for column in range(half)]
        words += [*(pair[0] for pair in pairs), *(pair[1] for pair in pairs)][:columns]
    factors = [1 / (1 - p) if word >= int(p * 2**32) else 0.0 for word in words]
    return torch.tensor(factors, dtype=torch.float64).view(like.shape)


def philox2x32(c0: int, c1: int, key: int) -> tuple[int, int]:
    """Ten rounds, as in the paper's figure (Salmon et al., SC 2011)."""
    for _ in range(10):
        product = 0xD256D193 * c0
        c0, c1 = (product >> 32) ^ key ^ c1, product % 2**32
        key = (key + 0x9E3779B9) % 2**32
    return c0, c1


def _add_norm(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor,
              eps: float, p: float, seed: Tensor | None) -> list[Tensor]:  # fmt: skip
    total = residual + (x + bias) * kept(x, p, seed)
    stats = row_stats(total)
    out = F.layer_norm(total, weight.shape, weight, shift, eps) if x.numel() else total
    return [out, total, stats]


def _add_norm_backward(grad_out: Tensor, grad_sum: Tensor, total: Tensor, stats: Tensor,
                       weight: Tensor, p: float, seed: Tensor | None) -> list[Tensor]:  # fmt: skip
    """By torch, with x = sum and no residual; dropout keeps of the gradient what it keeps of x."""
    shift = torch.zeros_like(weight).requires_grad_()
    total, weight = total.requires_grad_(), weight.requires_grad_()
    out = total
    if total.numel():
        out = F.layer_norm(total, weight.shape, weight, shift, EPS)
    d, dweight, dshift = gradients([out, total * 1.0], [total, weight, shift], [grad_out, grad_sum])
    dx = d * kept(d, p, seed)
    dbias = dx.reshape(-1, weight.numel()).sum(0) if total.numel() else torch.zeros_like(weight)
    return [dx if p else total.new_empty(0), d, dbias, dweight, dshift]


def _scores(shape: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
    return [normal(shape, dtype, seed, 4.0), 0.7]


def _causal_softmax(scores: Tensor, scale: float) -> list[Tensor]:
    q, k = scores.shape[-2:]
    seen = torch.arange(k) <= torch.arange(q)[:, None] + k - q
    return [(scores * scale).masked_fill(~seen, -torch.inf).softmax(-1)]


def _grad_and_scores(shape: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
    scores, scale = _scores(shape, dtype, seed)
    (probabilities,) = _causal_softmax(scores.double(), scale)
    return [normal(scores.shape, dtype, seed + 1), probabilities.to(dtype), scale]


def _causal_softmax_backward(grad: Tensor, probabilities: Tensor, scale: float) -> list[Tensor]:
    dim, dtype = -1, probabilities.dtype
    return [scale * torch.ops.aten._softmax_backward_data(grad, probabilities, dim, dtype)]


def _logits(shape: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
    rows = normal(shape, dtype, seed, 3.0).reshape(-1, shape[-1])
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(shape[-1], rows.shape[:1], generator=generator)
    return [rows, targets, 0.25]


def _cross_entropy_(logits: Tensor, targets: Tensor, scale: float) -> list[Tensor]:
    wanted = logits.clone().requires_grad_()
    losses = F.cross_entropy(wanted, targets, reduction="none")
    (gradient,) = gradients([losses], [wanted], [torch.full_like(losses, scale)])
    logits.copy_(gradient)
    return [losses.detach()]


def _case(op: str, inputs: Any, reference: Any, shapes: Any = ROWS, **more: Any) -> Case:
    return Case(op, shapes, FLOATS, inputs, reference, tolerance=TOLERANCE, **more)


def _backward_inputs(shape: Shape, dtype: torch.dtype, seed: int) -> list[Any]:
    return [normal(shape, dtype, seed + 2), *_bias_gelu_inputs(shape, dtype, seed)]


_NORM, _NORM_BACKWARD = "bias_dropout_add_layer_norm", "bias_dropout_add_layer_norm_backward"
LAYER_CASES = (
    _case("bias_gelu", _bias_gelu_inputs, _bias_gelu),
    _case("bias_gelu_backward", _backward_inputs, _bias_gelu_backward),
    *(_case(_NORM, _dropout_add(p)[0], _add_norm) for p in (0.0, 0.3)),
    *(_case(_NORM_BACKWARD, _dropout_add(p)[1], _add_norm_backward, NORMED) for p in (0.0, 0.3)),
    _case("causal_softmax", _scores, _causal_softmax, SCORES),
    _case("causal_softmax_backward", _grad_and_scores, _causal_softmax_backward, SCORES),
    _case(
        "softmax_cross_entropy_",
        _logits,
        _cross_entropy_,
        [shape for shape in ROWS if shape[-1]] + [(3, 50_257)],
        mutated=(0,),
    ),
)
