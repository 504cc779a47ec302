"""FusedAdamW: torch's AdamW, its state and its checkpoints, stepped by the kernel in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .feed import Feed
from .kernels import adamw_flat_

ZEROS = 5
"""Where `adamw_flat_` returns the number of gradients that are 0."""


@dataclass(frozen=True)
class Statistics:
    """Adam's variance v, the weights p and their last change, over all parameters stepped.

    `update_rms` is the root mean square of Adam's m / (sqrt(v) + eps), before rate and decay;
    `zeros` is how many elements of the gradients are 0."""

    variance_l1: float
    variance_max: float
    weight_l2: float
    update_l2: float
    update_rms: float
    zeros: int


class FusedAdamW(torch.optim.AdamW):
    """Steps float32 parameters as torch.optim.AdamW does, to rounding, and keeps what it keeps:
    param_groups, `step`, `exp_avg` and `exp_avg_sq`; either loads the other's state_dict.

    `grad_mul` scales the gradients of the next step only, in the same pass. `feeds` give it
    gradients that are not `.grad` (of the next step only, too). `counts` says of a parameter with
    a `.grad` whether it enters the statistics here. `grad_norm` is for whoever clips. A negative
    `grad_mul` leaves all as it is but for `step`: `untake` for whoever learns of it later. Without
    amsgrad and maximize.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.grad_mul: float | Tensor = 1.0
        self.grad_norm: Tensor | None = None
        self.feeds: dict[Tensor, Feed] = {}
        self.counts: Callable[[Tensor], bool] = lambda parameter: True
        self._sums: list[Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a feed or a gradient: a call of the kernel for those
        of a param group that are alike, since each call costs a launch on a GPU."""
        assert closure is None, "closures are not supported"
        multipliers: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            for group in self.param_groups:
                assert not group["amsgrad"] and not group["maximize"]
                for alike, calls in self._calls(group["params"]).items():
                    if alike.device not in multipliers:
                        multipliers[alike.device] = self._multiplier(alike.device)
                    self._call(alike, calls, multipliers[alike.device], group)
        self.forget_feeds()

    def forget_feeds(self) -> None:
        """Let the next step use `.grad` as it is."""
        self.feeds = {}
        self.grad_mul = 1.0

    def untake(self) -> None:
        """The last step was none: its multiplier was negative."""
        torch._foreach_sub_([state["step"] for state in self.state.values()], 1)

    def take_sums(self) -> Tensor:
        """What `adamw_flat_` returns, of this process's parameters, over all that was stepped since
        the last call: ZeRO 3 steps a group of them at a time."""
        total = merge(self._sums) if self._sums else torch.zeros(6, dtype=torch.float64)
        self._sums = []
        return total

    def _multiplier(self, device: torch.device) -> Tensor:
        return torch.as_tensor(self.grad_mul, dtype=torch.float32, device=device)

    def _calls(self, parameters: Sequence[Tensor]) -> dict[Alike, list[Pieces]]:
        """What the kernel is called with, and the step of each parameter counted."""
        fed = []
        for p in parameters:
            feed = self.feeds.get(p)
            if feed is None and p.grad is not None:
                feed = Feed([p.grad], [self.counts(p)])
            if feed is not None:
                fed.append((p, feed))
                if not self.state[p]:
                    self.state[p]["step"] = torch.tensor(0.0)
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        if fed:
            torch._foreach_add_([self.state[p]["step"] for p, _ in fed], 1)
        calls: dict[Alike, list[Pieces]] = {}
        for p, feed in fed:
            step = int(self.state[p]["step"])
            for piece in _pieces(p, self.state[p], feed):
                gradient, out = piece.tensors[3], piece.tensors[4:]
                low = out[0].dtype if out else None
                alike = Alike(p.device, gradient.dtype, low, piece.counted, step)
                calls.setdefault(alike, []).append(piece)
        return calls

    def _call(
        self, alike: Alike, calls: list[Pieces], grad_mul: Tensor, group: dict[str, Any]
    ) -> None:
        p, m, v, g, *out = map(list, zip(*(piece.tensors for piece in calls), strict=True))
        sums = adamw_flat_(
            p,
            m,
            v,
            g,
            out[0] if out else [],
            grad_mul,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=alike.step,
        )
        if alike.counted:
            self._sums.append(sums)


class Alike(NamedTuple):
    """What all tensors of a call of the kernel have in common."""

    device: torch.device
    gradient: torch.dtype
    low: torch.dtype | None
    counted: bool
    step: int


class Pieces(NamedTuple):
    """The weights, moments, gradient and low-precision copy, if there is one, of one piece."""

    tensors: tuple[Tensor, ...]
    counted: bool


def _pieces(p: Tensor, state: dict[str, Any], feed: Feed) -> Iterator[Pieces]:
    whole = [p.detach(), state["exp_avg"], state["exp_avg_sq"]]
    out = [] if feed.out is None else [feed.out.detach()]
    start = 0
    for gradient, counted in zip(feed.pieces, feed.counted, strict=True):
        end = start + gradient.numel()
        gradient = gradient.detach().contiguous()
        if gradient.shape == p.shape:  # views would take as long as a call
            yield Pieces((*whole, gradient, *out), counted)
        else:
            weights, m, v, *low = (tensor.view(-1)[start:end] for tensor in (*whole, *out))
            yield Pieces((weights, m, v, gradient.view(-1), *low), counted)
        start = end
    assert start == p.numel(), f"a gradient of {start} elements for {p.numel()} weights"


def merge(parts: Sequence[Tensor]) -> Tensor:
    """The sums of several parts as those of the whole."""
    rows = torch.cat([part.view(-1, 6) for part in parts])
    total = rows.sum(0)
    total[1] = rows[:, 1].max()
    return total


def statistics(sums: Tensor, elements: int) -> Statistics:
    """The sums over so many elements, under their names."""
    variance_l1, variance_max, weight_sq, change_sq, update_sq, zeros = sums.tolist()
    return Statistics(
        variance_l1,
        variance_max,
        weight_sq**0.5,
        change_sq**0.5,
        (update_sq / elements) ** 0.5,
        int(zeros),
    )
