"""Builds the checkpoints that are measured: real layouts, real classes, written by `torch.save`.

Usage: python -m bench.layout zero|three|many|ranks|moments|small|parameters|bloom ROOT SIZE
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import struct
import sys
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.utils.tensor_fragment import fragment_address

from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.transaction import crc32

DESCRIPTOR_CRC, ENTRY_CRC = 4, 16
"""Where the CRC is in a zip's data descriptor, and in its directory entry."""
STEP = 95000
DP, TP = 8, 4
LAYERS_PER_STAGE = 6
HIDDEN = 14336
WEIGHTS = {
    "self_attention.query_key_value.weight": 3 * HIDDEN * HIDDEN // TP,
    "self_attention.dense.weight": HIDDEN * HIDDEN // TP,
    "mlp.dense_h_to_4h.weight": 4 * HIDDEN * HIDDEN // TP,
    "mlp.dense_4h_to_h.weight": 4 * HIDDEN * HIDDEN // TP,
}
VECTORS = {
    "input_layernorm.weight": HIDDEN, "input_layernorm.bias": HIDDEN,
    "self_attention.query_key_value.bias": 3 * HIDDEN // TP, "self_attention.dense.bias": HIDDEN,
    "post_attention_layernorm.weight": HIDDEN, "post_attention_layernorm.bias": HIDDEN,
    "mlp.dense_h_to_4h.bias": 4 * HIDDEN // TP, "mlp.dense_4h_to_h.bias": HIDDEN,
}  # fmt: skip
"""Elements of one BLOOM layer in one tensor-parallel rank; those without weight decay apart."""


def main() -> int:
    """Build one run; SIZE is GiB of one shard, GIBxSHARDS, checkpoints, TENSORSxELEMENTS, or
    stages."""
    kind, root, size = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if kind == "zero":
        zero(root, float(size))
    elif kind == "three":
        for number in range(int(size)):
            zero(root, 2**-10, STEP + number)
    elif kind == "many":
        many(root, int(size))
    elif kind == "ranks":
        ranks(root, int(size))
    elif kind == "moments":
        gib, shards = size.split("x")
        moments(root, float(gib), int(shards))
    elif kind == "small":
        small(root, *map(int, size.split("x")))
    elif kind == "parameters":
        parameters(root, *map(int, size.split("x")))
    else:
        bloom(root, int(size))
    return 0


# --- runs ----------------------------------------------------------------------------------------


def zero(root: Path, gib: float, step: int = STEP) -> None:
    """One ZeRO-1 shard: fp32 masters, exp_avg, exp_avg_sq in one flat tensor each, real bytes."""
    count = int(gib * 2**30) // 12
    folder = _folder(root, step)
    shard = optimizer_shard([(count, torch.rand)], [{}], step)
    shard["optimizer_state_dict"]["partition_count"] = [1]
    _save(shard, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    _save(model_states(step, 1, 1), folder / "mp_rank_00_model_states.pt")
    _point(root, step)


def many(root: Path, count: int) -> None:
    """`count` ZeRO-1 shards of 1 MiB, all of them equal, and the model file of their ranks."""
    folder = _folder(root, STEP)
    shard = optimizer_shard([(2**20 // 12, torch.rand)], [{}])
    shard["optimizer_state_dict"]["partition_count"] = [count]
    first = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    _save(shard, first)
    for rank in range(1, count):
        shutil.copyfile(first, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    _save(model_states(STEP, count, 1), folder / "mp_rank_00_model_states.pt")
    _point(root, STEP)


def ranks(root: Path, count: int) -> None:
    """Two checkpoints, the newer one to be moved aside, of `count` ZeRO-1 shards with little in
    them, all of them equal, and the model file of their ranks."""
    for step in (STEP, STEP + 500):
        folder = _folder(root, step)
        names = [f"{layer}.{name}" for layer in range(2) for name in VECTORS]
        mapping = {name: fragment_address(64, 64 * i) for i, name in enumerate(names)}
        shard = optimizer_shard([(64 * len(names), torch.rand), (64, torch.rand)], [mapping, {}])
        shard["optimizer_state_dict"]["partition_count"] = [count, count]
        first = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
        _save(shard, first)
        for rank in range(1, count):
            shutil.copyfile(first, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        _save(model_states(step, count, 1), folder / "mp_rank_00_model_states.pt")
    _point(root, STEP + 500)


def moments(root: Path, gib: float, ranks: int) -> None:
    """ZeRO-1 shards of one parameter each, with moments that gradients can lead to."""
    folder = _folder(root, STEP)
    count = int(gib * 2**30) // 12 // ranks
    for rank in range(ranks):
        mapping = {"w": fragment_address(count, 0)}
        shard = optimizer_shard([(count, torch.rand)], [mapping])
        state = shard["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["exp_avg"] = torch.randn(count) * 1e-3
        state["exp_avg_sq"] = state["exp_avg"].square() * 4 + 1e-9
        shard["optimizer_state_dict"]["partition_count"] = [ranks]
        _save(shard, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    _save(model_states(STEP, ranks, 1), folder / "mp_rank_00_model_states.pt")
    _point(root, STEP)


def small(root: Path, tensors: int, elements: int) -> None:
    """One ZeRO-3 shard of many small tensors: sub-groups, with the state of DeepSpeed's CPU Adam,
    which keeps the step as a number."""
    folder = _folder(root, STEP)
    count = tensors // 3
    state = {i: adam(elements, torch.rand) | {"step": STEP} for i in range(count)}
    shard = {
        "zero_stage": 3, "partition_count": 1,
        "optimizer_state_dict": {"state": state, "param_groups": [group(0.1, range(count))]},
        "fp32_flat_groups": [torch.rand(elements) for _ in range(count)],
    }  # fmt: skip
    _save({"optimizer_state_dict": shard}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    states = model_states(STEP, 1, 1)
    _save(states, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    _point(root, STEP)


def parameters(root: Path, tensors: int, elements: int) -> None:
    """One stage-0 file of many small tensors: weights, moments, and a step for each weight."""
    folder = _folder(root, STEP)
    count = tensors // 4
    module = {f"layers.{i}.weight": torch.rand(elements) for i in range(count)}
    state = {i: adam(elements, torch.rand) for i in range(count)}
    groups = [group(0.1, range(count))]
    states = model_states(STEP, 1, 1)
    states |= {"module": module, "optimizer": {"state": state, "param_groups": groups}}
    _save(states, folder / "mp_rank_00_model_states.pt")
    _point(root, STEP)


def bloom(root: Path, stages: int) -> None:
    """BLOOM-176B as its 384 GPUs saved it, with 12 pipeline stages: two checkpoints, the newer one
    to be moved aside. 72 equal files stand for its layers. Tensors are holes."""
    for step in (STEP, STEP + 500):
        folder = _folder(root, step)
        for rank in range(stages * TP):
            mappings = [fragments(rank // TP, WEIGHTS), fragments(rank // TP, VECTORS)]
            for dp in range(DP):
                name = f"bf16_zero_pp_rank_{dp}_mp_rank_{rank:02d}_optim_states.pt"
                sizes = [(sum(f.numel for f in m[dp].values()), torch.empty) for m in mappings]
                save_hollow(optimizer_shard(sizes, [m[dp] for m in mappings]), folder / name)
            save_hollow(
                # A pipeline keeps its weights in layer files.
                model_states(step, DP, stages * TP, rank // TP) | {"module": None},
                folder / f"mp_rank_{rank:02d}_model_states.pt",
            )
        for layer in range(stages * LAYERS_PER_STAGE):
            for tp in range(TP):
                name = f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"
                sizes_16 = {**WEIGHTS, **VECTORS}.items()
                weights = {k: torch.empty(n, dtype=torch.bfloat16) for k, n in sizes_16}
                save_hollow(weights, folder / name)
    _point(root, STEP + 500)
    _check_hollow(root / f"global_step{STEP}" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")


def _folder(root: Path, step: int) -> Path:
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    return folder


def _point(root: Path, step: int) -> None:
    (root / "latest").write_text(f"global_step{step}")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))


# --- what a trainer saves ------------------------------------------------------------------------


def optimizer_shard(
    sizes: list[tuple[int, Any]], mappings: list[dict[str, Any]], step: int = STEP
) -> dict[str, Any]:
    """What DeepSpeed's BF16_Optimizer saves on one rank; a size is (elements, how to make them)."""
    return {
        "optimizer_state_dict": {
            "clip_grad": 1.0,
            "base_optimizer_state": {
                "state": {i: adam(count, make, step) for i, (count, make) in enumerate(sizes)},
                "param_groups": [group(0.1 if i == 0 else 0.0, [i]) for i in range(len(sizes))],
            },
            "single_partition_of_fp32_groups": [make(count) for count, make in sizes],
            "group_paddings": [0 for _ in sizes],
            "partition_count": [DP for _ in sizes],
            "ds_version": "0.19.8",
            "param_slice_mappings": mappings,
        },
        "ds_config": {"train_batch_size": 2048, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }


def adam(count: int, make: Any, step: int = STEP) -> dict[str, Any]:
    """The state of torch's AdamW for one flat tensor."""
    return {"step": torch.tensor(float(step)), "exp_avg": make(count), "exp_avg_sq": make(count)}


def group(weight_decay: float, params: Any) -> dict[str, Any]:
    """A param group of torch's AdamW."""
    return {
        "weight_decay": weight_decay, "lr": 6e-5, "betas": (0.9, 0.95), "eps": 1e-8,
        "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
        "differentiable": False, "fused": None, "decoupled_weight_decay": True,
        "params": list(params),
    }  # fmt: skip


def model_states(step: int, dp: int, mp: int, stage: int = 0) -> dict[str, Any]:
    """An mp_rank file: DeepSpeed's keys, and the client state of the bundled trainer."""
    samples = 2048 * step
    layers = LAYERS_PER_STAGE * max(1, mp // TP)  # three of them are embeddings and LayerNorm
    first = stage * LAYERS_PER_STAGE
    shapes = {
        f"{first + i}.{name}": torch.Size((n,))
        for i in range(LAYERS_PER_STAGE)
        for name, n in WEIGHTS.items()
    }
    return {
        "module": {}, "buffer_names": [], "optimizer": None, "param_shapes": [shapes],
        "frozen_param_shapes": None, "shared_params": {}, "frozen_param_fragments": None,
        "lr_scheduler": {
            "max_lr": 6e-5, "warmup_steps": 183105, "num_steps": samples, "warmup_tokens": 0,
            "num_tokens": 2048 * samples, "decay_style": "cosine", "decay_steps": 200000000,
            "min_lr": 6e-6,
        },
        "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "global_steps": step,
        "global_samples": samples, "dp_world_size": dp, "mp_world_size": mp,
        "checkpoint_parallel_dimensions": {"pp_degree": mp // TP or 1, "tp_degree": min(mp, TP)},
        "ds_config": {"train_batch_size": 2048, "bf16": {"enabled": True}}, "ds_version": "0.19.8",
        "trainer": "ckptsurgeon", "iteration": step, "tokens": 2048 * samples,
        "skip_train_iteration_range": [], "checkpoint_version": 3.0,
        "args": argparse.Namespace(
            num_layers=layers - 3, hidden_size=HIDDEN, num_attention_heads=112, seq_length=2048,
            global_batch_size=2048, micro_batch_size=2, lr=6e-5, min_lr=6e-6, adam_beta1=0.9,
            adam_beta2=0.95, adam_eps=1e-8, weight_decay=0.1, clip_grad=1.0, seed=42, bf16=True,
            iteration=step, consumed_train_samples=samples, consumed_valid_samples=0,
            consumed_train_tokens=2048 * samples, gigaflos_no_embeds=2.1e12, zero_stage=1,
            tensor_model_parallel_size=TP, pipeline_model_parallel_size=mp // TP or 1,
        ),
        "random_rng_state": random.getstate(), "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {},
    }  # fmt: skip


def fragments(stage: int, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """For each data-parallel rank, which part of which parameter its flat partition holds."""
    first = stage * LAYERS_PER_STAGE
    names = [
        (f"{first + i}.{name}", n) for i in range(LAYERS_PER_STAGE) for name, n in sizes.items()
    ]
    part = sum(n for _, n in names) // DP
    out: list[dict[str, Any]] = [OrderedDict() for _ in range(DP)]
    at = 0
    for name, count in names:
        for rank in range(at // part, min((at + count - 1) // part, DP - 1) + 1):
            start, end = max(at, rank * part), min(at + count, (rank + 1) * part)
            out[rank][name] = fragment_address(end - start, start - rank * part)
        at += count
    return out


# --- files ---------------------------------------------------------------------------------------


def _save(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_hollow(state: dict[str, Any], path: Path, step: int = STEP) -> None:
    """`torch.save` with holes for the tensors' bytes, then what can't be a hole: the last element
    of every tensor is one (Adam's step is itself), and its record has the CRC of its bytes."""
    with torch.serialization.skip_data():
        torch.save(state, path)
    archive = Archive.open(path)
    assert archive.directory is not None
    writes: list[tuple[int, bytes]] = []
    for record in archive.records.values():
        if record.name.startswith("data/"):
            last = struct.pack("<f", step if record.size == 4 else 1.0)
            crc = crc32.joined(crc32.of_zeros(record.size - 4), zlib.crc32(last), 4)
            end = archive.payload(record.name) + record.size
            entry = archive.directory.offset + record.entry
            writes += [
                (end - 4, last),
                (end + DESCRIPTOR_CRC, struct.pack("<I", crc)),
                (entry + ENTRY_CRC, struct.pack("<I", crc)),
            ]
    with path.open("r+b") as file:
        for offset, data in writes:
            os.pwrite(file.fileno(), data, offset)


def _check_hollow(path: Path) -> None:
    """torch reads what `save_hollow` says that it wrote."""
    state = torch.load(path, mmap=True, weights_only=False)["optimizer_state_dict"]
    adam = state["base_optimizer_state"]["state"][0]
    values = (adam["step"].item(), adam["exp_avg"][0].item(), adam["exp_avg_sq"][-1].item())
    if values != (STEP, 0.0, 1.0):
        raise RuntimeError(f"{path}: torch reads {values}")


if __name__ == "__main__":
    sys.exit(main())
