"""The dtype of a run, and what follows when another one is asked for at a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .config import Config

SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""What a wrapper takes from a checkpoint, and must not take from one of another dtype."""


def saved_dtype(args: Any) -> str:
    """The dtype that a checkpoint was made in."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def gradient_dtype(config: Config, saved_args: Any) -> str:
    """In which dtype gradients of bf16 add up: what the config says or, with `auto`, what the
    checkpoint was made with; in a new run fp32 where DeepSpeed can, which is not without ZeRO."""
    if config.grad_accum_dtype != "auto" or config.dtype != "bf16":
        return config.grad_accum_dtype
    if saved_args is None:
        return "fp32" if config.zero_stage else "bf16"
    if saved_dtype(saved_args) != "bf16":
        return "bf16" if config.zero_stage == 1 else "fp32"  # ZeRO 1 keeps the files it has
    return str(getattr(saved_args, "grad_accum_dtype", "bf16"))  # older ones lack it


def can_change(config: Config, args: Any, universal: bool) -> bool:
    """Whether this checkpoint, of another dtype, can be loaded: its masters must lie where the
    wrapper of the new dtype looks for them."""
    if universal:
        return config.zero_stage > 0
    own = getattr(args, "grad_accum_dtype", "bf16") if args.bf16 else ""
    return config.zero_stage == 2 or (config.zero_stage == 1 and own != "fp32")


@contextmanager
def masters_as_truth(engine: Any, args: Any) -> Iterator[None]:
    """Around the load of a checkpoint of another dtype: the weights are made of its masters, not of
    its rounded weights, and the loss scaler is this dtype's own, as it starts."""
    wrapper, prefix = engine.optimizer, engine._get_zero_ckpt_prefix
    own = {name: getattr(wrapper, name) for name in SCALER if name in vars(wrapper)}
    # The files of bf16 have names of their own.
    engine._get_zero_ckpt_prefix = lambda rank, bf16_mode: prefix(rank, args.bf16)
    try:
        yield
    finally:
        del engine._get_zero_ckpt_prefix
    for name, value in own.items():
        setattr(wrapper, name, value)
    wrapper.update_lp_params()
