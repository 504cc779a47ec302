"""Steps of torch.distributed.checkpoint as torchtitan saves them, of any sizes and cuts.

`python -m tests.support.generated_dcp JSON` writes those that it is told (see `written`) on all
ranks, each tensor as a DTensor that is cut along an axis, or whole on each rank.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

MOMENTS = ("exp_avg", "exp_avg_sq")


def numbers(name: str, shape: list[int], seed: int) -> torch.Tensor:
    """Above 0, as a second moment is."""
    generator = torch.Generator().manual_seed(hash_of(name) + seed)
    return torch.rand(shape, generator=generator) + 0.1


def hash_of(name: str) -> int:
    return sum(ord(letter) * 31**i for i, letter in enumerate(name)) % 2**31


def state(shapes: dict[str, list[int]], step: int) -> dict[str, Any]:
    """What a trainer of parameters of these shapes saves at a step, which are other numbers at
    another one."""
    out: dict[str, Any] = {"train_state.step": step}
    for name, shape in shapes.items():
        out[name] = numbers(name, shape, 3 * step)
        for seed, moment in enumerate(MOMENTS, 1):
            out[f"optimizer.state.{name}.{moment}"] = numbers(name, shape, 3 * step + seed)
        out[f"optimizer.state.{name}.step"] = torch.tensor(float(step))
        decay = 0.1 if len(shape) > 1 else 0.0
        settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
        for key, value in settings.items():
            out[f"optimizer.param_groups.{name}.{key}"] = value
    return out


def written(root: Path, step: int, shapes: dict[str, list[int]]) -> Path:
    """A run of one such step, by this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(shapes, step), checkpoint_id=root / f"step-{step}", no_dist=True)
    return root


def main(told: list[dict[str, Any]]) -> None:
    """Each has the root, step and shapes, and by name the axis of a cut, or None."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in told:
        whole = state(each["shapes"], each["step"])
        for name, axis in each["cuts"].items():
            how = Replicate() if axis is None else Shard(axis)
            for key in (name, *(f"optimizer.state.{name}.{moment}" for moment in MOMENTS)):
                whole[key] = distribute_tensor(whole[key], mesh, [how])
        dcp.save(whole, checkpoint_id=Path(each["root"]) / f"step-{each['step']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(json.loads(sys.argv[1]))
