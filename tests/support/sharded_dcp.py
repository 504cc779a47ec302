"""Two ranks save DTensors that are cut along axis 0 or 1, as torchtitan and OLMo-core do."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

NAMES = {"rows.weight": 0, "columns.weight": 1}


def tensor(name: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) + seed)
    return torch.rand(10, 6, generator=generator) + 0.1


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for name, axis in NAMES.items():
        state[name] = distribute_tensor(tensor(name), mesh, [Shard(axis)])
        for seed, moment in enumerate(("exp_avg", "exp_avg_sq"), 1):
            key = f"optimizer.state.{name}.{moment}"
            state[key] = distribute_tensor(tensor(name, seed), mesh, [Shard(axis)])
        state[f"optimizer.state.{name}.step"] = torch.tensor(3.0)
        for key, value in {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}.items():
            state[f"optimizer.param_groups.{name}.{key}"] = value
    state["train_state.step"] = 3
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(sys.argv[1])
