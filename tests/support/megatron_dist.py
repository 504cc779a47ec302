"""Megatron-LM's torch_dist layout, saved and loaded by torch's own distributed checkpoint."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.support.in_process import one_rank
from tests.support.megatron_legacy import BATCH, SCHEDULE, cosine
from tests.support.tiny_attention import FUSED, HIDDEN

COMMON = "common_state/shard_0_1"


class Planner(DefaultSavePlanner):
    """As megatron-core's: an object comes as the bytes that it is to be saved as."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object


def save(
    root: Path,
    steps: tuple[int, ...] = (20, 30),
    *,
    integrity: bool = False,
    file: bool = False,
    args: bool = True,
    sharding: str = "fully_reshardable",
    **command_line: Any,
) -> Path:
    """The common state is a value of `.metadata`, or with `file` the older `common.pt`. Without
    `args`, as Megatron-Bridge saves it. It says that the optimizer is saved by this `sharding`."""
    for step in steps:
        folder = root / f"iter_{step:07d}"
        line = argparse.Namespace(
            lr=6e-5, min_lr=6e-6, weight_decay=0.1, global_batch_size=BATCH,
            consumed_train_samples=step * BATCH, use_distributed_optimizer=True,
        )  # fmt: skip
        vars(line).update(command_line)
        schedule: dict[str, Any] = {**SCHEDULE, "num_steps": step * BATCH}
        groups = [
            {
                "wd_mult": mult, "lr_mult": 1.0, "max_lr": 6e-5, "min_lr": 6e-6,
                "lr": cosine(schedule, step * BATCH), "betas": (0.9, 0.95), "eps": 1e-8,
                "weight_decay": 0.1 * mult, "step": step, "default_config": True,
            }
            for mult in (1.0, 0.0)
        ]  # fmt: skip
        common = {
            "args": line, "checkpoint_version": 3.0, "iteration": step,
            "opt_param_scheduler": schedule, "optimizer": {"optimizer": {"param_groups": groups}},
            "content_metadata": {"distrib_optim_sharding_type": sharding},
        }  # fmt: skip
        if not args:
            del common["args"]
        state: dict[str, Any] = {}
        if file:
            folder.mkdir(parents=True)
            torch.save(common, folder / "common.pt")
        else:
            state[COMMON] = io.BytesIO()
            torch.save([common], state[COMMON])
        for name in ("param", "exp_avg", "exp_avg_sq"):
            for weight in ("up", "down"):
                # Small enough beside exp_avg_sq for gradients to lead to it.
                scale = 0.2 if name == "exp_avg" else 1.0
                tensor = (torch.rand(64, 4) + 0.1) * scale
                state[f"optimizer.state.{name}.{weight}.weight"] = tensor
                if name == "exp_avg_sq":
                    tensor[0, 0] = 100.0
                if name == "param":
                    state[f"{weight}.weight"] = tensor.bfloat16()
        if "num_attention_heads" in command_line or not args:
            state |= _attention()
        if step == steps[-1]:  # in each save `.metadata` lists the values in another order
            state = dict(reversed(state.items()))
        with warnings.catch_warnings():  # torch warns that there is no process group
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, planner=Planner(), no_dist=True)
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(config))
        if integrity:
            sums = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}
            document = {"algorithm": "sha256", "files": sums}
            (folder / "integrity.json").write_text(json.dumps(document, indent=2))
    (root / "latest_checkpointed_iteration.txt").write_text(str(steps[-1]))
    return root


def _attention() -> dict[str, torch.Tensor]:
    """Two layers as one tensor, as megatron-core saves a homogeneous stack."""
    inside = "decoder.layers.self_attention.linear_qkv"
    sizes = {
        f"{inside}.weight": (2, FUSED, HIDDEN), f"{inside}.bias": (2, FUSED),
        f"{inside}.layer_norm_weight": (2, HIDDEN),
    }  # fmt: skip
    state = {}
    for name, size in sizes.items():
        master = torch.rand(size) + 0.1
        state[name] = master.bfloat16()
        kept = {"param": master, "exp_avg": 0.2 * torch.rand(size), "exp_avg_sq": master}
        state |= {f"optimizer.state.{key}.{name}": tensor for key, tensor in kept.items()}
    return state


def loaded(
    root: Path, step: int, shape: tuple[int, ...] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The common state, read as newer versions read it, and the optimizer's tensors."""
    folder = root / f"iter_{step:07d}"
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    kept = {name: names[name].size for name in names if name.startswith("optimizer.")}
    tensors = {name: torch.ones(shape or size) for name, size in kept.items()}
    wanted: dict[str, Any] = {**tensors, COMMON: io.BytesIO()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    with torch.serialization.safe_globals([argparse.Namespace]):
        held = wanted[COMMON]
        held = torch.load(held, weights_only=True) if isinstance(held, io.BytesIO) else held
    return held[0], tensors


def flatten(root: Path, step: int) -> Path:
    """The step anew as megatron-core up to 0.15 saves it with fully_sharded_model_space on two
    tensor-parallel and two data-parallel ranks: the weights cut by rows, each half of a state
    flattened and cut among the latter (`sharded_tensor_to_torch_sharded_tensor` in
    `dist_checkpointing/strategies/torch.py` of Megatron-LM c550cf6c, core_v0.13.0)."""
    folder = root / f"iter_{step:07d}"
    common, tensors = loaded(root, step)
    weights = {
        name: torch.ones(64, 4, dtype=torch.bfloat16) for name in ("up.weight", "down.weight")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(weights, checkpoint_id=folder, no_dist=True)
    state: dict[str, Any] = {COMMON: io.BytesIO()}
    torch.save([common], state[COMMON])
    for path in folder.glob("__*.distcp"):
        path.unlink()
    with one_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, tensor in weights.items():
            state[name] = _sharded((64, 4), [((half * 32, 0), t) for half, t in _halves(tensor)])
        for name, tensor in tensors.items():
            pieces = [
                ((half, 0, first), part.flatten()[first:last].view(1, 1, -1))
                for half, part in _halves(tensor)
                for first, last in ((0, 100), (100, 128))
            ]
            state[name] = _sharded((2, 1, 128), pieces)
        dcp.save(state, checkpoint_id=folder, planner=Planner(), no_dist=True)
    return root


def _halves(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(half, tensor[half * 32 : half * 32 + 32].contiguous()) for half in (0, 1)]


def _sharded(size: tuple[int, ...], chunks: list[tuple[tuple[int, ...], torch.Tensor]]) -> Any:
    shards = [Shard.from_tensor_and_offsets(tensor, list(at), rank=0) for at, tensor in chunks]
    return init_from_local_shards(shards, *size)


def save_chained(root: Path, second: str = "moment2_buffer", step: int = 20) -> Path:
    """Two optimizers in a chain, AdaptiveMuon (or NorMuon) for `up` and Adam for `down`: the common
    state numbers them, and one name holds the tensors of both (`chained_optim_avoid_prefix` of
    `ChainedOptimizer.sharded_state_dict` in Megatron-LM d98e8a64)."""
    save(root, (step,))
    folder = root / f"iter_{step:07d}"
    common, _ = loaded(root, step)
    (group, _) = common["optimizer"]["optimizer"]["param_groups"]
    muon = {key: value for key, value in group.items() if key not in ("betas", "eps")}
    muon |= {"optimizer": "adaptive_muon", "momentum": 0.95, "nesterov": True, "beta2": 0.95}
    groups = [[{**muon, "eps": 1e-8}], [{**group, "optimizer": "adam"}]]
    common["optimizer"] = {
        i: {"optimizer": {"param_groups": each}} for i, each in enumerate(groups)
    }
    state: dict[str, Any] = {COMMON: io.BytesIO()}
    torch.save([common], state[COMMON])
    keys = {"up": ("momentum_buffer", second), "down": ("exp_avg", "exp_avg_sq")}
    for weight, names in keys.items():
        for name in ("fp32_param", *names):
            state[f"optimizer.state.{name}.{weight}.weight"] = torch.full((64, 4), 0.1)
    for path in folder.glob("__*.distcp"):
        path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, planner=Planner(), no_dist=True)
    return root
