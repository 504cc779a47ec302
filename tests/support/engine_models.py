"""The small models of `deepspeed_engine`, by their kinds; each takes 8 numbers."""

from __future__ import annotations

from typing import Any


def model_of(kind: str) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if kind in ("adapter", "other adapter", "unfrozen"):
        return _adapted(kind)
    if kind.startswith("moe"):
        return _moe(2 if kind == "moe-on-two-ranks" else 1)
    if kind == "wide":  # 8-bit optimizers keep fewer than 4096 elements in 32 bits
        return nn.Sequential(nn.Linear(8, 640), nn.LayerNorm(640), nn.Linear(640, 8))
    if kind in ("fused", "apart", "turned"):
        return _wide(kind)
    if kind.endswith("words"):
        return _words(20 if kind == "more words" else 12)
    if kind.startswith("sized"):
        one, two = map(int, kind.split("-")[1:])
        return nn.Sequential(nn.Linear(8, one), nn.LayerNorm(one), nn.Linear(one, two))
    deeper = [nn.Linear(8, 8)] if kind == "deeper" else []
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), *deeper)


def _adapted(kind: str) -> Any:
    """A frozen layer beside one that is trained, and a norm with buffers; `unfrozen` trains all.
    The first two begin with other weights."""
    import torch
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1 if kind == "adapter" else 2)
            self.base, self.adapter, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.base.requires_grad_(kind == "unfrozen")

        def forward(self, x: Any) -> Any:
            return self.norm(self.base(x) + self.adapter(x))

    return Adapted()


def _wide(kind: str) -> Any:
    """One projection to 16 numbers, its weight as usual or `turned` as transformers' Conv1D has it,
    or two to 8 and 8 side by side."""
    import torch
    from torch import nn

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "fused":
                self.both = nn.Linear(8, 16)
            elif kind == "turned":
                self.both = nn.Linear(8, 16)
                self.both.weight = nn.Parameter(self.both.weight.detach().t().contiguous())
            else:
                self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.out = nn.Linear(16, 8)

        def forward(self, x: Any) -> Any:
            if kind == "fused":
                return self.out(self.both(x))
            if kind == "turned":
                return self.out(x @ self.both.weight + self.both.bias)
            return self.out(torch.cat([self.one(x), self.two(x)], -1))

    return Wide()


def _words(count: int) -> Any:
    """A vocabulary, of which words are chosen by the input."""
    from torch import nn

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(count, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.out(self.embed(x.abs().long() % count))

    return Words()


def _moe(ranks: int) -> Any:
    from deepspeed.moe.layer import MoE
    from torch import nn

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.moe = MoE(8, nn.Linear(8, 8), 2, ep_size=ranks, k=1, min_capacity=0)

        def forward(self, x: Any) -> Any:
            return x + self.moe(self.first(x))[0]

    return Sparse()
