"""Steps that OLMo-core's OLMoDDPOptimizer, train module and Checkpointer save and load, on a CPU.

The constructor of the train module wants CUDA and its own model, and the Trainer that: a step is
made by hand. What saves and loads is the library's own, with one rank, or where this module is
run as one of two: `train ROOT STOP`, or `resume OUT STEP …`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.optim.moe_optimizer import OLMoDDPOptimizer, OLMoDDPOptimizerConfig
from olmo_core.optim.scheduler import CosWithWarmup
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module.transformer.ddp_train_module import OLMoDDPTrainModule
from torch.distributed.device_mesh import init_device_mesh

from tests.support.megatron_real import OnCpu

LR, STEPS, BATCH = 1e-3, 20, 32
SHARDED = 100
"""The elements from which the ranks share a parameter's state: of four, one weight has so many."""
COSINE = CosWithWarmup(warmup=2)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A process group of one rank."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Module(OLMoDDPTrainModule):
    """What its direct saving and loading need."""

    def __init__(self, lr: float = LR, **settings: Any) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        self.net.register_buffer("score_bias", torch.ones(3))
        if dist.get_world_size() > 1:
            self.net.bfloat16()  # of fp32 weights the library shares no masters
        self.model_parts = [self.net]
        self.eval_only = self.expand_shared_qk_norm_on_load = False
        self.reset_optimizer_states_on_load = False
        self.reset_optimizer_states_on_resume = settings.pop("reset", False)
        named = dict(self.net.named_parameters())
        groups = [
            {"named_params": {n: p for n, p in named.items() if end in n}, "pg": "dp",
             "weight_decay": decay}
            for end, decay in (("weight", 0.1), ("bias", 0.0))
        ]  # fmt: skip
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "dp"))
        with OnCpu():  # bf16 is known by the name of a CUDA type
            self.optim = OLMoDDPOptimizer(
                groups, {"dense": mesh, "moe": None}, lr=lr, dp_group=dist.group.WORLD,
                device=torch.device("cpu"), do_not_shard_tensor_smaller_than=SHARDED, **settings,
            )  # fmt: skip

    def update(self) -> None:
        """One step of the library's optimizer."""
        for parameter in self.net.parameters():
            parameter.grad = None
        data = torch.ones(2, 8, dtype=next(self.net.parameters()).dtype)
        self.net(data).pow(2).mean().backward()
        self.optim.step()

    def held(self) -> dict[str, Any]:
        """By parameter, what the next update begins with."""
        return {name: state.to_local().clone() for name, state in self.optim.states.items()}

    def steps(self) -> set[int]:
        """How often each parameter was updated."""
        return {int(step) for name, step in self.held().items() if name.endswith(".step")}


def checkpointer(root: Path) -> Checkpointer:
    return Checkpointer(work_dir=root.parent / "work", save_overwrite=True)


def train(root: Path, stop: int) -> None:
    """Every second step saved, with the config as a run's `config.json` has it."""
    module = Module()
    for step in range(1, stop + 1):
        module.update()
        if step % 2:
            continue
        loader = {
            "batches_processed": step,
            "tokens_processed": step * BATCH,
            "epoch": 1,
            "seed": 7,
        }
        state = {
            "global_step": step, "global_train_tokens_seen": step * BATCH, "max_steps": STEPS,
            "epoch": 1, "world_size": dist.get_world_size(), "data_loader": loader,
        }  # fmt: skip
        checkpointer(root).save(root / f"step{step}", module, state)
        optim = OLMoDDPOptimizerConfig(lr=LR).as_config_dict()
        config = {
            "train_module": {"optim": optim, "scheduler": COSINE.as_config_dict()},
            "trainer": {"max_duration": {"value": STEPS, "unit": "steps"}},
            "data_loader": {"global_batch_size": BATCH},
        }
        if dist.get_rank() == 0:
            (root / f"step{step}" / "config.json").write_text(json.dumps(config, default=list))


def resume(step: Path, **settings: Any) -> tuple[Module, dict[str, Any]]:
    """A new module that has loaded the step, and the trainer's state."""
    module = Module(**settings)
    state = checkpointer(step.parent).load(step, module)
    assert state is not None
    return module, state


def main() -> None:
    what, path, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    if what == "train":
        train(Path(path), int(rest[0]))
    else:
        out = []
        for step in rest:
            module, state = resume(Path(step))
            held = module.held()
            module.update()
            out.append({"held": held, "step": state["global_step"], "then": module.steps()})
        torch.save(out, f"{path}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
