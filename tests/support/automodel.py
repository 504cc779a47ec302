"""Runs of NeMo Automodel, saved and loaded by its own Checkpointer on a CPU: `save ROOT` and
`load ROOT OUT`, which writes what model and optimizer have then; on several ranks with FSDP2.

`make test-formats` installs the library without its dependencies: its checkpoint component and its
scheduler need none but torch and transformers. The model is one of transformers', of tiny size."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.library_source import FOLDER

STEPS = (2, 4, 6)
LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 32,
}  # fmt: skip


def build(seed: int, ranks: int) -> tuple[Any, Any, Any]:
    """Model, optimizer, and the library's scheduler."""
    from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = OptimizerParamScheduler(
        adam, init_lr=1e-4, max_lr=1e-3, min_lr=1e-5, lr_warmup_steps=2, lr_decay_steps=40,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=40,
        wd_incr_style="constant",
    )  # fmt: skip
    return model, adam, schedule


def checkpointer(root: Path, args: argparse.Namespace) -> Any:
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    rank = dist.get_rank() if dist.is_initialized() else 0
    config = CheckpointingConfig(
        checkpoint_dir=root, model_save_format=args.format, save_consolidated=args.consolidated
    )
    return config.build(rank, 0, 0)


def save(root: Path, args: argparse.Namespace, ranks: int) -> None:
    """As `save_checkpoint` of its `recipes/base_recipe.py`: the model, then the optimizer."""
    model, adam, schedule = build(1234, ranks)
    saver = checkpointer(root, args)
    for step in range(1, max(STEPS) + 1):
        words = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=words, labels=words).loss.backward()
        adam.step()
        adam.zero_grad()
        schedule.step(1)
        if step in STEPS:
            folder = root / f"epoch_0_step_{step}"
            folder.mkdir(parents=True, exist_ok=True)
            saver.save_model(model, str(folder))
            saver.save_optimizer(adam, model, str(folder), [schedule])
    if not dist.is_initialized() or dist.get_rank() == 0:
        (root / "LATEST").symlink_to(f"epoch_0_step_{step}")


def load(root: Path, out: Path, args: argparse.Namespace, ranks: int) -> None:
    """What its own picker picks."""
    from nemo_automodel.components.checkpoint.utils import find_latest_checkpoint

    model, adam, schedule = build(4321, ranks)
    loader = checkpointer(root, args)
    folder = Path(find_latest_checkpoint(str(root)))
    loader.load_model(model, str(folder / "model"))
    loader.load_optimizer(adam, model, str(folder), [schedule])
    held = {
        name: {
            "weights": _whole(parameter),
            **{key: _whole(adam.state[parameter][key]) for key in ("exp_avg", "exp_avg_sq")},
        }
        for name, parameter in model.named_parameters()
    }
    settings = ("betas", "eps", "lr", "weight_decay")
    told = {
        "held": held,
        "groups": [{key: group[key] for key in settings} for group in adam.param_groups],
        "adam_steps": {int(_whole(state["step"])) for state in adam.state.values()},
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(told, out)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("root", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--format", default="safetensors")
    parser.add_argument("--consolidated", default="false")
    args = parser.parse_args()
    sys.path.append(str(FOLDER))  # last: it has folders of other names than these, too
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    if args.what == "save":
        save(args.root, args, ranks)
    else:
        load(args.root, args.out, args, ranks)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
