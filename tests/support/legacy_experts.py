"""Experts in Megatron-LM's legacy files: each rank counts its own from 0, and numbers its states in
the order of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support import megatron_legacy
from tests.support.new_numbers import MOMENTS

DENSE = {"router.weight": (6, 8), "norm.weight": (8,)}
EXPERT = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
GROUPED = "decoder.layers.0.mlp.experts.linear_fc1.weight{}"
State = dict[str, torch.Tensor]


def numbers(name: str, step: int) -> State:
    """Of a parameter of all experts, by kind."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 31 + step)
    size = DENSE.get(name, (4, 8))
    return {kind: torch.rand(size, generator=generator) + 0.1 for kind in ("weights", *MOMENTS)}


def files(root: Path, step: int, ranks: int) -> list[Path]:
    names = ["mp_rank_00" + (f"_{rank:03d}" if ranks > 1 else "") for rank in range(ranks)]
    return [root / f"iter_{step:07d}" / name / "model_optim_rng.pt" for name in names]


def saved(root: Path, step: int, each: list[dict[str, State]]) -> Path:
    """A run of one step, with what each expert rank has by its own names; optimizers that number it
    in the order of the model."""
    ranks = len(each)
    sizes = {"expert_model_parallel_size": ranks, "use_distributed_optimizer": False}
    megatron_legacy.save(root, (step,), tensor=1, pipeline=1, **sizes)
    folder = root / f"iter_{step:07d}" / "mp_rank_00"
    (folder / "distrib_optim.pt").unlink()
    with megatron_legacy.megatron_enums():
        state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        (folder / "model_optim_rng.pt").unlink()
        folder.rmdir()
        for file, own in zip(files(root, step, ranks), each, strict=True):
            state["model"] = {name: kinds["weights"] for name, kinds in own.items()}
            inner = state["optimizer"]["optimizer"]
            inner["state"] = {
                i: {kind: kinds[kind] for kind in MOMENTS} for i, kinds in enumerate(own.values())
            }
            matrices = [i for i, name in enumerate(own) if name != "norm.weight"]
            for group, params in zip(
                inner["param_groups"], (matrices, [list(own).index("norm.weight")]), strict=True
            ):
                group["params"] = params
            file.parent.mkdir()
            torch.save(state, file)
    return root


def spread(step: int, experts: int, ranks: int, called: str) -> list[dict[str, State]]:
    """What each rank has of a model, as it calls that."""
    count = experts // ranks
    return [
        {name: numbers(name, step) for name in DENSE}
        | {called.format(i): numbers(called.format(rank * count + i), step) for i in range(count)}
        for rank in range(ranks)
    ]


def held(root: Path, step: int, ranks: int) -> list[dict[str, State]]:
    out = []
    for file in files(root, step, ranks):
        with megatron_legacy.megatron_enums():
            state: Any = torch.load(file, weights_only=False)
        moments = state["optimizer"]["optimizer"]["state"]
        names = list(state["model"])
        out.append({n: {"weights": state["model"][n], **moments[names.index(n)]} for n in names})
    return out
