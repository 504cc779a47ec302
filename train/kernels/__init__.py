"""The fused kernels: each runs natively on CPU and CUDA, and in plain torch everywhere.

A kernel is `<name>.py` here (schema, formula in torch, gradient) and, under the same name,
`csrc/kernels/cpu/<name>.cpp` and `csrc/kernels/cuda/<name>.cu` with `<name>.cpp` that binds it.
"""

from __future__ import annotations

from .adamw_flat import adamw_flat_
from .bias_dropout_add_layer_norm import bias_dropout_add_layer_norm
from .bias_gelu import bias_gelu
from .causal_softmax import causal_softmax
from .grad_norm_check import grad_norm_check
from .library import CHOICES, choose, load
from .linear import linear
from .linear_cross_entropy import linear_cross_entropy

__all__ = [
    "CHOICES",
    "adamw_flat_",
    "bias_dropout_add_layer_norm",
    "bias_gelu",
    "causal_softmax",
    "choose",
    "grad_norm_check",
    "linear",
    "linear_cross_entropy",
    "load",
]
