"""The elements by which ZeRO 3 makes each parameter's slices equally long: in no parameter, and
stepped with it."""

from __future__ import annotations

from typing import Any

import torch


def padding(engine: Any) -> int:
    """How many this rank has."""
    return sum(map(sum, engine.optimizer.groups_padding))


@torch.no_grad()
def clear_padding(engine: Any) -> None:
    """Set them to 0, where they stay: DeepSpeed leaves there what the memory held before, which
    would enter the statistics of the weights."""
    wrapper = engine.optimizer
    groups = zip(
        wrapper.fp32_partitioned_groups_flat,
        wrapper.fp16_partitioned_groups,
        wrapper.groups_padding,
        strict=True,
    )
    for flat, slices, pads in groups:
        end = 0
        for part, pad in zip(slices, pads, strict=True):
            end += part.ds_numel
            flat[end - pad : end] = 0
