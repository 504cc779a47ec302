"""Tiny models with attention under the names of each trainer, and their logits by torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ckptsurgeon.plans.edits import Change, Computed
from ckptsurgeon.plans.plan import Plan

HIDDEN, HEADS, GROUPS, WIDTH = 8, 4, 2, 2
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": WIDTH,
}  # fmt: skip
"""As `config.json` of transformers has it."""
MEGATRON = {
    "num_attention_heads": HEADS, "hidden_size": HIDDEN, "group_query_attention": True,
    "num_query_groups": GROUPS, "kv_channels": WIDTH,
}  # fmt: skip
"""As Megatron-LM's args and Megatron-core's config have it."""
OLMO = {
    "d_model": HIDDEN,
    "block": {"sequence_mixer": {"n_heads": HEADS, "n_kv_heads": GROUPS}},
}
"""As the model of OLMo-core's config has it."""
FUSED = (HEADS + 2 * GROUPS) * WIDTH
"""Rows of fused queries, keys and values."""


class Layered(nn.Module):
    """Layers of separate projections; `names` are those of a norm, of queries, keys and values, in
    which `{}` is the number of the layer."""

    def __init__(self, names: tuple[str, str, str, str], layers: int = 2) -> None:
        super().__init__()
        self.paths = [[name.format(i) for name in names] for i in range(layers)]
        for norm, *projections in self.paths:
            _put(self, norm, nn.RMSNorm(HIDDEN))
            for path, rows in zip(projections, (HEADS, GROUPS, GROUPS), strict=True):
                _put(self, path, nn.Linear(HIDDEN, rows * WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, *projections in self.paths:
            inner = self.get_submodule(norm)(x)
            q, k, v = (self.get_submodule(path)(inner) for path in projections)
            x = x + q * torch.cat([k, v], -1)
        return x


class Fused(nn.Module):
    """A layer whose queries, keys and values are one projection, as Megatron-DeepSpeed has it."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        _put(self, "self_attention.query_key_value", nn.Linear(HIDDEN, FUSED))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.get_submodule("self_attention.query_key_value")(self.input_layernorm(x))
        q, rest = fused[..., :HIDDEN], fused[..., HIDDEN:]
        return x + q * rest


LLAMA_NAMES = (
    "model.layers.{}.input_layernorm", "model.layers.{}.self_attn.q_proj",
    "model.layers.{}.self_attn.k_proj", "model.layers.{}.self_attn.v_proj",
)  # fmt: skip
OLMO_NAMES = (
    "blocks.{}.attention_norm", "blocks.{}.attention.w_q", "blocks.{}.attention.w_k",
    "blocks.{}.attention.w_v",
)  # fmt: skip


def _put(module: nn.Module, path: str, inner: nn.Module) -> None:
    """`inner` under a dotted path."""
    *folders, last = path.split(".")
    for name in folders:
        if not hasattr(module, name):
            module.add_module(name, nn.Module())
        module = getattr(module, name)
    module.add_module(last, inner)


# --- what torch says -----------------------------------------------------------------------------


class Layer(NamedTuple):
    """Views of one layer's queries [heads, width, hidden], keys [groups, width, hidden], with their
    biases as [heads, width] and [groups, width] if they have any, and the norm's gain."""

    query: torch.Tensor
    key: torch.Tensor
    gain: torch.Tensor
    query_bias: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    shift: torch.Tensor | None = None


def estimates(layer: Layer, sigmas: float = 5) -> list[float]:
    """The largest logit of each head by second moments of isotropic inputs."""
    heads, width, _ = layer.query.shape
    groups = len(layer.key)
    shift = torch.zeros_like(layer.gain) if layer.shift is None else layer.shift
    moments = []
    for rows, bias in ((layer.query, layer.query_bias), (layer.key, layer.key_bias)):
        matrix = rows.double() * layer.gain.double()
        constant = rows.double() @ shift.double()
        constant = constant if bias is None else constant + bias.double()
        moments.append(matrix @ matrix.mT + constant[:, :, None] * constant[:, None, :])
    keys = moments[1].repeat_interleave(heads // groups, 0)
    return [sigmas * float(v) for v in ((moments[0] * keys).sum((1, 2)) / width).sqrt()]


def factors(made: Plan) -> set[float]:
    """The numbers that weights and masters are multiplied by."""
    return {
        change.new.numbers[0]
        for change in made.changes
        if isinstance(change, Change) and isinstance(change.new, Computed)
    }


def clip(layers: Iterable[Layer], threshold: float, used: set[float]) -> int:
    """Scale the views of the heads above the threshold as torch does, by the nearest of the `used`
    factors; how many heads they are."""
    count = 0
    for layer in layers:
        shared = len(layer.key) < len(layer.query)
        for head, largest in enumerate(estimates(layer)):
            if largest <= threshold:
                continue
            count += 1
            left = threshold / largest
            by = min(used, key=lambda each: abs(each - (left if shared else math.sqrt(left))))
            assert abs(by - (left if shared else math.sqrt(left))) < 1e-6 * by
            sides: list[Any] = [layer.query, layer.query_bias]
            sides += [] if shared else [layer.key, layer.key_bias]
            for rows in sides:
                if rows is not None:
                    rows[head] = (rows[head].float() * by).to(rows.dtype)
    return count


def grouped(weight: torch.Tensor, groups: int, width: int = WIDTH) -> tuple[Any, Any]:
    """Views of queries and keys of rows that lie by groups; of a bias too."""
    rows = weight.view(groups, -1, width, *weight.shape[1:])
    each = rows.shape[1] - 2
    return rows[:, :each], rows[:, each]


def of_groups(
    weights: Mapping[str, torch.Tensor], prefix: str, norm: str, groups: int
) -> Iterator[Layer]:
    """A layer of fused rows as one Layer for each group, whose heads are contiguous views."""
    query, key = grouped(weights[f"{prefix}.weight"], groups)
    bias = weights.get(f"{prefix}.bias")
    shift = weights.get(norm.removesuffix("weight") + "bias")
    gain = weights[norm]
    for group in range(groups):
        extra: dict[str, Any] = {} if shift is None else {"shift": shift}
        if bias is not None:
            q, k = grouped(bias, groups)
            extra |= {"query_bias": q[group], "key_bias": k[group : group + 1]}
        yield Layer(query[group], key[group : group + 1], gain, **extra)


def of_pair(query: torch.Tensor, key: torch.Tensor, gain: torch.Tensor) -> Layer:
    """A layer of separate projections."""
    width = len(query) // HEADS
    return Layer(query.view(HEADS, width, -1), key.view(GROUPS, width, -1), gain)
