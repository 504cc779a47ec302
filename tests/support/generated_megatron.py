"""Runs of megatron-core's own Llama of any sizes, cut over tensor ranks and stages.

`python -m tests.support.generated_megatron JSON`, once for each rank, makes those that it is told:
each has its root, the step that is saved, a seed, tensor ranks, stages, and sizes by the names of
Megatron-LM's arguments.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import megatron_llama
from tests.support.cpu_rank import cpu_rank, end_workers


def main(told: list[dict[str, Any]]) -> None:
    megatron_llama.as_gpu()
    from megatron.core import parallel_state

    with cpu_rank():
        for each in told:
            root, step = Path(each.pop("root")), each.pop("step")
            args = megatron_llama.arguments([str(root), str(step)])
            del args.root, args.stop, args.fresh, args.saved, args.newest
            vars(args).update(each)
            cuts = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
            args.data_parallel_size = dist.get_world_size() // (cuts[0] * cuts[1])
            parallel_state.initialize_model_parallel(*cuts)
            megatron_llama.train(root, step, args, [step])
            parallel_state.destroy_model_parallel()
            end_groups()
    end_workers()


def end_groups() -> None:
    """Those that the core forgets, with their threads: 64 of each run, in each rank."""
    gc.collect()
    dist.barrier()
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
