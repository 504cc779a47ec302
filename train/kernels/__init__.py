"""The fused kernels: each runs natively on CPU and CUDA, and in plain torch everywhere.

A kernel is `<name>.py` here (schema, formula in torch, gradient) and, under the same name,
`csrc/kernels/cpu/<name>.cpp` and `csrc/kernels/cuda/<name>.cu` with `<name>.cpp` that binds it.
"""

from __future__ import annotations

from .adamw_flat import adamw_flat_
from .grad_norm_check import grad_norm_check
from .library import load

__all__ = ["adamw_flat_", "grad_norm_check", "load"]
