"""FSDP2 and FSDP1 by Accelerate and by the Trainer, on CPU ranks that speak gloo.

`python -m tests.support.fsdp2 LIBRARY RUN STOP`, once for each rank: trains to step STOP, saves
every second step, resumes where something is saved, and prints as JSON what each update used.
Accelerate gives a CPU no FSDP, so the kind of machine is set by hand; all else is the libraries'.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

PEAK, EVERY = 1e-3, 2
ON_CPU = {"sync_module_states": False, "cpu_ram_efficient_loading": False}
"""What FSDP1 wants a GPU for."""
FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"


class Net(torch.nn.Module):
    """Two layers; the biases do not decay."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        loss = self.second(self.first(x)).pow(2).mean()
        return {"loss": loss, "logits": loss.reshape(1, 1)}


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if "bias" in n], "weight_decay": 0.0},
    ]


def used(adam: Any) -> dict[str, Any]:
    """What the next update uses: the sums of this rank's moments, and all of the tensors."""
    adam = getattr(adam, "optimizer", adam)
    states = [state for state in adam.state.values() if state]
    parameters = [p for group in adam.param_groups for p in group["params"]]
    return {
        "tensors": {
            "weights": [whole(p) for p in parameters],
            **{
                kind: [whole(adam.state[p][kind]) for p in parameters if adam.state[p]]
                for kind in ("exp_avg", "exp_avg_sq")
            },
        },
        **{key: [g[key] for g in adam.param_groups] for key in ("lr", "betas", "eps")},
        "weight_decay": [g["weight_decay"] for g in adam.param_groups],
        "adam_step": max((int(state["step"]) for state in states), default=0),
        "moments": sum(float(own(s["exp_avg"]).abs().sum()) for s in states),
    }


def whole(tensor: Any) -> list[float]:
    """Of all ranks, which call this together."""
    return list(whole_tensor(tensor).flatten().tolist())


def whole_tensor(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own(tensor: Any) -> Any:
    """What of a tensor this rank has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_gpu() -> None:
    """FSDP is chosen for several GPUs only."""
    state = PartialState()
    state.distributed_type = DistributedType.MULTI_GPU
    state.device = torch.device("cpu")  # not cpu:0, which FSDP1 takes for another


def by_accelerate(
    root: Path,
    stop: int,
    peaks: Sequence[float] = (PEAK,),
    version: int = 2,
    kind: str = SHARDED,
) -> dict[int, Any]:
    """A model for each of `peaks`, with an optimizer and a schedule of its own. With several, what
    each update used is a list."""
    PartialState(cpu=True)
    as_gpu()
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type=kind,
        **({"use_orig_params": True, **ON_CPU} if version == 1 else {}),
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin)
    jobs = []
    for peak in peaks:
        model: Any = Net()
        if version == 1:
            model = accelerator.prepare(model)
        adam: Any = torch.optim.AdamW(groups(model), lr=peak, betas=(0.9, 0.95))
        if version == 1:
            adam = accelerator.prepare(adam)
        else:
            model, adam = accelerator.prepare(model, adam)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam.optimizer, lambda step: 0.9**step)
        jobs.append((model, adam, accelerator.prepare(schedule)))
    saved = sorted(int(path.name.partition("_")[2]) for path in root.glob("step_*"))
    if saved:
        accelerator.load_state(str(root / f"step_{saved[-1]}"))
    seen: dict[int, Any] = {}
    for step in range(saved[-1] if saved else 0, stop):
        each = [used(adam) for _, adam, _ in jobs]
        seen[step + 1] = each if len(jobs) > 1 else each[0]
        for model, adam, schedule in jobs:
            accelerator.backward(model(torch.ones(2, 8) * (step + 1))["loss"])
            adam.step()
            schedule.step()
            adam.zero_grad()
        if (step + 1) % EVERY == 0:
            accelerator.save_state(str(root / f"step_{step + 1}"))
    return seen


def whole_files(root: Path, stop: int) -> dict[int, Any]:
    return by_accelerate(root, stop, kind=FULL)


def first_version(root: Path, stop: int) -> dict[int, Any]:
    return by_accelerate(root, stop, version=1)


def local_files(root: Path, stop: int) -> dict[int, Any]:
    return by_accelerate(root, stop, version=1, kind=LOCAL)


def two_models(root: Path, stop: int) -> dict[int, Any]:
    return by_accelerate(root, stop, (PEAK, 2 * PEAK))


def two_whole_models(root: Path, stop: int) -> dict[int, Any]:
    return by_accelerate(root, stop, (PEAK, 2 * PEAK), kind=FULL)


def by_one_trainer(root: Path, stop: int) -> dict[int, Any]:
    """Without FSDP: one process, and an optimizer that numbers its parameters."""
    return by_trainer(root, stop, sharded=False)


def by_deepspeed(root: Path, stop: int) -> dict[int, Any]:
    """With an engine of DeepSpeed, whose optimizer is not looked into."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
        "zero_allow_untested_optimizer": True,
    }
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return by_trainer(root, stop, sharded=False, deepspeed=config)


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def trainer_first_version(root: Path, stop: int) -> dict[int, Any]:
    return by_trainer(root, stop, version=1)


def trainer_whole_files(root: Path, stop: int) -> dict[int, Any]:
    return by_trainer(root, stop, kind=FULL)


def by_trainer(
    root: Path,
    stop: int,
    sharded: bool = True,
    deepspeed: Any = None,
    version: int = 2,
    kind: str = SHARDED,
) -> dict[int, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seen: dict[int, Any] = {}

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            if deepspeed is None:
                seen[state.global_step + 1] = used(live["optimizer"])
            else:
                seen[state.global_step + 1] = state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            if state.global_step >= stop:
                control.should_training_stop = True

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.full((8,), index / 64), "labels": torch.zeros(())}

    if deepspeed is None:
        PartialState(cpu=True)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(root), max_steps=12, save_steps=EVERY, save_strategy="steps",
        per_device_train_batch_size=2, learning_rate=PEAK, warmup_steps=2, report_to=[],
        disable_tqdm=True, use_cpu=deepspeed is None, weight_decay=0.1, logging_strategy="no",
        fsdp="full_shard" if sharded else None, deepspeed=deepspeed,
        fsdp_config={"version": version, "state_dict_type": kind, **ON_CPU} if sharded else None,
    )  # fmt: skip
    if sharded:
        as_gpu()
    trainer = Trainer(model=Net(), args=arguments, train_dataset=Data(), callbacks=[Watch()])
    trainer.train(resume_from_checkpoint=any(root.glob("checkpoint-*")))
    return seen


TRAINERS: dict[str, Callable[[Path, int], dict[int, Any]]] = {
    "accelerate": by_accelerate, "two-models": two_models, "trainer": by_trainer,
    "one-trainer": by_one_trainer, "deepspeed": by_deepspeed, "accelerate-full": whole_files,
    "accelerate-1": first_version, "trainer-1": trainer_first_version,
    "trainer-full": trainer_whole_files, "two-models-full": two_whole_models,
    "accelerate-local": local_files,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=list(TRAINERS))
    parser.add_argument("run", type=Path)
    parser.add_argument("stop", type=int)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    seen = TRAINERS[wanted.library](wanted.run, wanted.stop)
    if PartialState().is_main_process:
        print(json.dumps(seen))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
