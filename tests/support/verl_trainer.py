"""Runs of verl's own checkpoint manager: a Llama of one layer under FSDP2 or FSDP1, on CPUs. As a
program it prints what each update used."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.newest_megatron import beside

sys.path.insert(0, str(beside("verl")))
sys.path.append(str(beside("sources")))

from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.logger.aggregate_logger import concat_dict_to_str
from verl.utils.torch_functional import get_cosine_schedule_with_warmup

PEAK, WARMUP, STEPS, EVERY = 1e-3, 2, 20, 2
TINY = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, max_position_embeddings=32,
)  # fmt: skip
PARTS = ["model", "optimizer", "extra"]


def used(adam: Any) -> dict[str, Any]:
    states = [adam.state.get(p, {}) for group in adam.param_groups for p in group["params"]]
    moments = [own(state["exp_avg"]) for state in states if state]
    return {
        **{key: [group[key] for group in adam.param_groups]
           for key in ("lr", "betas", "eps", "weight_decay")},
        "adam_step": max((int(state["step"]) for state in states if state), default=0),
        "moments": sum(float(moment.abs().sum()) for moment in moments),
    }  # fmt: skip


def own(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    """As `RayPPOTrainer` saves and resumes: a folder for each step, and the tracker file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("stop", type=int)
    parser.add_argument("--one", action="store_true", help="FSDP1, as its engine makes it")
    parser.add_argument("--load", nargs="+", default=PARTS, help="what is loaded of a step")
    parser.add_argument("--log", type=Path, help="where it prints, as its LocalLogger does")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model: Any = LlamaForCausalLM(TINY)
    if wanted.one:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        model = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), device_mesh=mesh,
            use_orig_params=False,
        )  # fmt: skip
    else:
        fully_shard(model)
    adam = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(adam, WARMUP, STEPS)
    manager = FSDPCheckpointManager(
        model, adam, schedule, processing_class=None,
        checkpoint_config=OmegaConf.create({"load_contents": wanted.load, "save_contents": PARTS}),
    )  # fmt: skip
    first, seen = 0, {}
    if (latest := find_latest_ckpt_path(wanted.root)) is not None:
        first = int(Path(latest).name.rpartition("_")[2])
        manager.load_checkpoint(str(Path(latest, "actor")))
    for step in range(first + 1, wanted.stop + 1):
        words = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=words, labels=words).loss.backward()
        seen[step] = used(adam)
        adam.step()
        adam.zero_grad()
        schedule.step()
        if wanted.log and dist.get_rank() == 0:
            said = {"actor/pg_loss": -0.1, "actor/lr": schedule.get_last_lr()[0]}
            with wanted.log.open("a") as log:
                log.write(f"(TaskRunner pid=7) {concat_dict_to_str(said, step)}\n")
        if step % EVERY == 0:
            folder = wanted.root / f"global_step_{step}/actor"
            manager.save_checkpoint(str(folder), global_step=step)
            if dist.get_rank() == 0:
                (wanted.root / "latest_checkpointed_iteration.txt").write_text(str(step))
            dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
