"""The tensors of a DeepSpeed step, by file and path, and the masters as DeepSpeed gathers them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

Path_ = tuple[Any, ...]


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, torch.Tensor]]:
    """Every tensor in what torch.load gives."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))


def loaded(root: Path, step: int) -> dict[Path_, torch.Tensor]:
    """Every tensor of a step by file and path."""
    return {
        (file.name, *path): tensor.clone()
        for file in sorted((root / f"global_step{step}").glob("*.pt"))
        for path, tensor in leaves(torch.load(file, weights_only=False))
    }


def kind(path: Path_) -> str:
    """What a tensor of a DeepSpeed file is, by its path."""
    keys = set(map(str, path[1:]))
    if keys & {"single_partition_of_fp32_groups", "fp32_flat_groups"}:
        return "master"
    if "layer_" in path[0]:
        return "weights"
    return next((k for k in ("exp_avg", "exp_avg_sq") if k in keys), "") or (
        "weights" if "module" in keys else "other"
    )


def gathered(root: Path, step: int) -> dict[str, torch.Tensor]:
    """The fp32 masters as whole tensors, by DeepSpeed's own tool where it knows the shards."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    (first, *others) = sorted((root / f"global_step{step}").glob("*optim_states.pt"))
    shard = torch.load(first, weights_only=False)["optimizer_state_dict"]
    if "zero_stage" in shard or "single_partition_of_fp32_groups" not in shard:
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(root), f"global_step{step}"))
    assert not others  # BF16_Optimizer
    model = torch.load(first.with_name("mp_rank_00_model_states.pt"), weights_only=False)["module"]
    return {
        name: flat[at.start : at.start + at.numel].view(model[name].shape)
        for flat, mapping in zip(
            shard["single_partition_of_fp32_groups"], shard["param_slice_mappings"], strict=True
        )
        for name, at in mapping.items()
    }
