"""Layers whose weights are cut over the ranks of a tensor-parallel group.

The scheme of Megatron-LM (Shoeybi et al. 2019, section 3): the first matrix of a pair is cut by
columns, the second by rows, so that one all-reduce in each direction serves both. On one rank
every layer is the plain torch one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .device import device_kind
from .grid import Grid
from .kernels import linear


class ColumnParallelLinear(nn.Linear):
    """y = x Wᵀ + b, with the rows of W (the outputs) cut over the ranks: each has its own y."""

    def __init__(self, inputs: int, outputs: int, grid: Grid, bias: bool = True) -> None:
        super().__init__(inputs, outputs // grid.tensor_size, bias=bias)
        self.grid = grid
        mark_split(self.weight, 0, grid)
        if bias:
            mark_split(self.bias, 0, grid)

    def reset_parameters(self) -> None:
        """The weight is left to `init_normal_`, which draws the same on any number of ranks."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ without the bias, for a kernel that adds it."""
        return linear(copy_to_group(x, self.grid), self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(copy_to_group(x, self.grid), self.weight, self.bias)


class RowParallelLinear(nn.Linear):
    """y = x Wᵀ + b, with the columns of W (the inputs) cut over the ranks: x is each rank's own,
    y and b are whole on every rank."""

    def __init__(self, inputs: int, outputs: int, grid: Grid, bias: bool = True) -> None:
        super().__init__(inputs // grid.tensor_size, outputs, bias=bias)
        self.grid = grid
        mark_split(self.weight, 1, grid)

    def reset_parameters(self) -> None:
        """The weight is left to `init_normal_`."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ without the bias, for a kernel that adds it."""
        return reduce_from_group(linear(x, self.weight), self.grid)

    def forward(self, x: Tensor) -> Tensor:
        if self.grid.tensor_size == 1:
            return linear(x, self.weight, self.bias)
        return self.product(x) if self.bias is None else self.product(x) + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows (the vocabulary) are cut over the ranks."""

    def __init__(self, vocabulary: int, hidden: int, grid: Grid) -> None:
        super().__init__(vocabulary // grid.tensor_size, hidden)
        self.grid = grid
        mark_split(self.weight, 0, grid)

    def reset_parameters(self) -> None:
        """The weight is left to `init_normal_`."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.grid.tensor_size == 1:
            return super().forward(tokens)
        own, elsewhere = own_tokens(tokens, self.num_embeddings, self.grid)
        rows = super().forward(own).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_from_group(rows, self.grid)


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, grid: Grid) -> Tensor:
    """The loss of each token, [n], from this rank's columns [n, v / ranks] of the logits."""
    return _apply(_CrossEntropy, logits, targets, grid)


def init_normal_(weight: Tensor, std: float, grid: Grid) -> None:
    """Draw the whole matrix and keep this rank's part, so that any number of ranks starts alike."""
    dim = getattr(weight, "partition_dim", None)
    if dim is None or grid.tensor_size == 1:
        nn.init.normal_(weight, 0.0, std)
        return
    shape = list(weight.shape)
    shape[dim] *= grid.tensor_size
    whole = torch.empty(shape, dtype=weight.dtype).normal_(0.0, std)
    with torch.no_grad():
        weight.copy_(whole.chunk(grid.tensor_size, dim)[grid.tensor_rank])


def mark_split(weight: Tensor, dim: int, grid: Grid) -> None:
    """Note on a parameter that it is one rank's part along `dim`, in Megatron's attributes."""
    if grid.tensor_size > 1:
        weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        weight.partition_dim = dim  # type: ignore[attr-defined]
        weight.partition_stride = 1  # type: ignore[attr-defined]


def own_tokens(tokens: Tensor, rows: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """Token ids as numbers of this rank's rows, and where they belong to another rank."""
    own = tokens - grid.tensor_rank * rows
    elsewhere = (own < 0) | (own >= rows)
    return own.masked_fill(elsewhere, 0), elsewhere


@contextmanager
def own_random_numbers(grid: Grid, wanted: bool = True) -> Iterator[None]:
    """Inside, the ranks of a group draw different numbers; outside they go on drawing the same.

    What Megatron's rng tracker does for the parts of a layer that are cut over the ranks."""
    if not wanted or grid.tensor_size == 1:
        yield
        return
    seed = int(torch.randint(2**31, ())) + 2718 + grid.tensor_rank
    devices = [torch.cuda.current_device()] if device_kind() == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def copy_to_group(x: Tensor, grid: Grid) -> Tensor:
    """x as it is; on the way back the gradients of all ranks are summed."""
    return x if grid.tensor_size == 1 else _apply(_Copy, x, grid.tensor_group)


def reduce_from_group(x: Tensor, grid: Grid) -> Tensor:
    """The sum of x over the ranks; on the way back the gradient as it is."""
    return x if grid.tensor_size == 1 else _apply(_Reduce, x, grid.tensor_group)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return torch.as_tensor(function.apply(*arguments))  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _CrossEntropy(torch.autograd.Function):
    """log(sum exp) - logit of the target, where no rank ever holds all columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, grid: Grid) -> Tensor:
        group = grid.tensor_group
        highest = logits.max(dim=-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits.float() - highest.float().unsqueeze(-1)
        own, elsewhere = own_tokens(targets, logits.shape[-1], grid)
        wanted = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = shifted.exp_()
        # One message for both: the logit of the target and the sum.
        parts = torch.stack([wanted, exponentials.sum(dim=-1)])
        dist.all_reduce(parts, group=group)
        probabilities = exponentials.div_(parts[1].unsqueeze(-1))
        ctx.save_for_backward(probabilities, own, elsewhere)
        ctx.dtype = logits.dtype
        return parts[1].log() - parts[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, own, elsewhere = ctx.saved_tensors
        # `probabilities` is this function's own, but a second backward may come.
        out = probabilities.clone()
        out.scatter_add_(-1, own.unsqueeze(-1), elsewhere.unsqueeze(-1).to(out.dtype) - 1.0)
        return out.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None
