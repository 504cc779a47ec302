"""The dtype of a run, and what follows when another one is asked for at a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .config import Config

SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""What a wrapper takes from a checkpoint, and must not take from one of another dtype."""


def saved_dtype(args: Any) -> str:
    """The dtype that a checkpoint was made in."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def gradient_dtype(config: Config, saved_args: Any) -> str:
    """In which dtype gradients of bf16 add up: what the config says or, with `auto`, what the
    checkpoint was made with; in a run that was not in bf16 yet fp32 where DeepSpeed can, which is
    not without ZeRO."""
    if config.grad_accum_dtype != "auto" or config.dtype != "bf16":
        return config.grad_accum_dtype
    if saved_args is None or saved_dtype(saved_args) != "bf16":
        return "fp32" if config.zero_stage else "bf16"
    return str(getattr(saved_args, "grad_accum_dtype", "bf16"))  # older ones lack it


@contextmanager
def masters_as_truth(engine: Any, state: Mapping[str, Any]) -> Iterator[None]:
    """Around the load of a checkpoint of another dtype, of which `state` is a model_states: the
    weights are made of its masters, not of its rounded weights, and the loss scaler is this dtype's
    own, as it starts."""
    if engine.zero_optimization():
        with _from_partitions(engine, state["args"]):
            yield
    else:
        with _from_whole(engine, state):
            yield


@contextmanager
def _from_partitions(engine: Any, args: Any) -> Iterator[None]:
    """With ZeRO each wrapper reads the masters of each other."""
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
    if engine.zero_optimization_stage() < 3:  # stage 3 makes its weights of the masters by itself
        wrapper.update_lp_params()


@contextmanager
def _from_whole(engine: Any, state: Mapping[str, Any]) -> Iterator[None]:
    """Without ZeRO the masters of fp32 are the weights themselves, and the wrapper of 16 bit keeps
    its own around the inner optimizer's state."""
    wrapper = engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    load_inner = inner.load_state_dict
    masters = [p for group in inner.param_groups for p in group["params"]]
    weights = [p for group in getattr(wrapper, "fp16_groups", [masters]) for p in group]
    names = {p: name for name, p in engine.module.named_parameters()}

    @torch.no_grad()
    def load(saved: Mapping[str, Any], **_: Any) -> None:
        load_inner(saved.get("optimizer_state_dict", saved))
        if "fp32_groups" in saved:
            truth = [p for group in saved["fp32_groups"] for p in group]
        else:
            truth = [state["module"][names[weight]] for weight in weights]
        for weight, master, kept in zip(weights, masters, truth, strict=True):
            master.copy_(kept)
            weight.copy_(kept)

    wrapper.load_state_dict = load
    try:
        yield
    finally:
        del wrapper.load_state_dict
