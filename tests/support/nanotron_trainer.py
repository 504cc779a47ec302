"""Runs of nanotron's own DistributedTrainer: a Llama of one layer, on CPUs. As a program it prints
what each update used.

The code that builds, loads, schedules, updates, saves and prints is nanotron's. What it takes of a
GPU is put in its place: the kernels of flash-attn, NCCL's averages, and the device itself.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch.nn import functional as F

from tests.support.cpu_rank import cpu_rank
from tests.support.newest_megatron import beside

PEAK, WARMUP, DECAY, FLOOR, EVERY, LENGTH, BATCH = 1e-3, 2, 18, 1e-5, 2, 16, 2
"""The schedule, how often it saves, and the tokens of a sample and samples of a data rank."""
WORDS, SAMPLES = 64, 512


# --- in place of a GPU ---------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, *, max_seqlen_q: int, **_: Any) -> Any:
    """flash-attn's, of sequences that are all as long."""
    groups = q.shape[1] // k.shape[1]
    split = [
        each.view(-1, max_seqlen_q, *each.shape[1:]).transpose(1, 2)
        for each in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    ]
    return F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(0, 1)


def norm(x: Any, weight: Any, bias: Any, *, eps: float, **_: Any) -> Any:
    """flash-attn's RMSNorm."""
    return F.rms_norm(x, weight.shape, weight, eps)


class Rotary(torch.nn.Module):
    """flash-attn's positions, which are left out: the model is none the better for them."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Any, kv: Any) -> Any:
        return q, kv


def averaged(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction with NCCL's average, which gloo has not."""

    def run(tensors: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return reduce(tensors, op=op, group=group, **more)
        reduce(tensors, op=dist.ReduceOp.SUM, group=group)
        with torch.no_grad():
            for each in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                each.div_(dist.get_world_size(group))
        return types.SimpleNamespace(wait=lambda: None)

    return run


def declare(name: str, **names: Any) -> None:
    """A module without code."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)


def put_in_place() -> None:
    """All that is imported and is not here. nanotron 0.4 imports its config while its logging is
    imported, for the name of a type, and its config imports its logging: the name is enough."""
    sys.path.insert(0, str(beside("nanotron")))
    kernels = {"flash_attn_varlen_func": attention, "flash_attn_with_kvcache": None}
    declare("flash_attn", bert_padding=None)
    declare("flash_attn.flash_attn_interface", **kernels)
    declare("flash_attn.layers")
    declare("flash_attn.layers.rotary", RotaryEmbedding=Rotary)
    declare("flash_attn.ops")
    declare("flash_attn.ops.triton")
    declare("flash_attn.ops.triton.layer_norm", layer_norm_fn=norm)
    sys.modules["wandb"] = None  # type: ignore[assignment]
    for name in ("all_reduce", "all_reduce_coalesced"):
        setattr(dist, name, averaged(getattr(dist, name)))
    for name in ("set_device", "synchronize", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *_: None)
    declare("nanotron.config", LoggingArgs=object)
    sys.modules["nanotron.config.config"] = sys.modules["nanotron.config"]
    importlib.import_module("nanotron.logging")
    del sys.modules["nanotron.config"], sys.modules["nanotron.config.config"]


# --- the run -------------------------------------------------------------------------------------


def config(wanted: argparse.Namespace) -> dict[str, Any]:
    """Its config, with the values that are given on the command line."""
    ranks, root = int(os.environ.get("WORLD_SIZE", 1)), str(wanted.root)
    made: dict[str, Any] = {
        "general": {"project": "tiny", "run": "tiny", "ignore_sanity_checks": False},
        "parallelism": {"dp": ranks // wanted.tp, "pp": 1, "tp": wanted.tp},
        "model": {
            "init_method": {"std": 0.02}, "dtype": "bfloat16",
            "model_config": {
                "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS,
                "max_position_embeddings": LENGTH, "is_llama_config": True,
            },
        },
        "tokenizer": {},
        "checkpoints": {
            "checkpoints_path": root, "resume_checkpoint_path": root, "checkpoint_interval": EVERY,
            "checkpoints_path_is_shared_file_system": True,
        },
        "logging": {},
        "tokens": {
            "sequence_length": LENGTH, "micro_batch_size": BATCH,
            "batch_accumulation_per_replica": 1, "train_steps": wanted.stop,
        },
        "optimizer": {
            "zero_stage": wanted.zero, "weight_decay": 0.1, "clip_grad": 1.0,
            "accumulate_grad_in_fp32": True, "adam_eps": 1e-8, "adam_beta1": 0.9,
            "adam_beta2": 0.95, "torch_adam_is_fused": False,
            "learning_rate_scheduler": {
                "learning_rate": PEAK, "lr_warmup_steps": WARMUP, "lr_warmup_style": "linear",
                "lr_decay_style": "cosine", "lr_decay_steps": DECAY, "min_decay_lr": FLOOR,
            },
        },
        "data": {"dataset": None, "seed": 7},
    }  # fmt: skip
    for word in wanted.config:
        path, _, value = word.partition("=")
        *outer, last = path.split(".")
        section = made
        for key in outer:
            section = section[key]
        section[last] = yaml.safe_load(value)
    return made


class Rows:
    """What its loader takes of a `datasets.Dataset`: the same samples in every launch."""

    def __init__(self) -> None:
        drawn = np.random.default_rng(3).integers(WORDS, size=(SAMPLES, LENGTH + 1))
        self.rows = drawn.astype(np.int64)

    def with_format(self, **_: Any) -> Rows:
        return self

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": self.rows[number]}


def loader(trainer: Any) -> Any:
    """As its `run_train.py` makes it: it goes on after the samples that the checkpoint counts."""
    from nanotron import dataloader

    dataloader.datasets = types.SimpleNamespace(Dataset=Rows)
    return dataloader.get_train_dataloader(
        train_dataset=Rows(), sequence_length=trainer.sequence_length,
        parallel_context=trainer.parallel_context, input_pp_rank=0, output_pp_rank=0,
        micro_batch_size=trainer.micro_batch_size,
        consumed_train_samples=trainer.consumed_train_samples, dataloader_num_workers=0,
        seed_worker=trainer.config.data.seed, dataloader_pin_memory=False,
    )  # fmt: skip


def watched(trainer: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Its batches. `seen` gets what the live optimizer uses at each update, by its number."""
    adam, batch = trainer.optimizer.get_base_optimizer(), {}

    def note(*_: Any) -> None:
        masters = [p for group in adam.param_groups for p in group["params"]]
        states = [adam.state[p] for p in masters if adam.state.get(p)]
        data = b"".join(p.detach().contiguous().numpy().tobytes() for p in masters)
        gradients = sum(float(p.grad.double().pow(2).sum()) for p in masters)
        seen[trainer.iteration_step] = {
            **{key: [group[key] for group in adam.param_groups]
               for key in ("lr", "betas", "eps", "weight_decay")},
            "adam_step": max((int(state["step"]) for state in states), default=0),
            "moments": sum(float(state["exp_avg"].abs().sum()) for state in states),
            "masters": hashlib.sha256(data).hexdigest(),
            "norm": sum(float(p.double().pow(2).sum()) for p in masters) ** 0.5,
            "gradient": gradients**0.5,
            "batch": batch["input_ids"].flatten().tolist(),
        }  # fmt: skip

    adam.register_step_pre_hook(note)
    for drawn in loader(trainer):  # a copy to a GPU would make them contiguous
        batch = {key: value.contiguous() for key, value in drawn.items()}
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("stop", type=int)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--config", nargs="+", default=[], help="optimizer.clip_grad=0.5 …")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    put_in_place()
    with cpu_rank(), tempfile.TemporaryDirectory() as folder:
        from nanotron.trainer import DistributedTrainer, RotaryEmbedding

        RotaryEmbedding.init_rotary_embeddings = lambda self: None  # of inference, and on CUDA
        file = Path(folder, "config.yaml")
        file.write_text(yaml.safe_dump(config(wanted)))
        trainer, seen = DistributedTrainer(str(file)), {}
        trainer.train(watched(trainer, seen))
        if dist.get_rank() == 0:
            print(json.dumps(seen))


if __name__ == "__main__":
    main()
