"""Which checkpoint Megatron-LM would load: `RUN --KEY VALUE …`, by its own functions; with `--clean
FOLDER …` after its clean-up of those that are not persistent, with `--save-local N …` after saves.

The run's tracker and the folders are looked at by `_load_base_checkpoint` of the newest
`megatron.training`, and local checkpoints by NVIDIA's own `LocalCheckpointManager`."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

from tests.support import newest_megatron
from tests.support.cpu_rank import cpu_rank

NVRX = newest_megatron.beside("nvrx")


def picked(run: str, args: Any) -> int:
    """The iteration that a launch with `args` goes on from."""
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    for folder in args.clean:
        checkpointing.cleanup_old_non_persistent_checkpoint(folder, leave_ckpt_num=1)
    context = {}
    if args.non_persistent_ckpt_type == "local":
        sys.path.insert(0, str(NVRX))
        package = "nvidia_resiliency_ext.checkpointing.local"
        manager = importlib.import_module(f"{package}.ckpt_managers.local_manager")
        states = importlib.import_module(f"{package}.basic_state_dict")
        for iteration in args.save_local:
            local = manager.LocalCheckpointManager(args.non_persistent_local_ckpt_dir)
            local.save(states.BasicTensorAwareStateDict({"iteration": iteration}), iteration)
        local = manager.LocalCheckpointManager(args.non_persistent_local_ckpt_dir)
        context = {"local_checkpoint_manager": local}
        found = checkpointing._get_non_persistent_iteration("", args, context)
        tracker = checkpointing.get_checkpoint_tracker_filename(run)
        named, _ = checkpointing.read_metadata(tracker)
        return int(found if found >= named else named)
    _, name, _, _ = checkpointing._load_base_checkpoint(run, args, rank0=True)
    return int(re.search(r"iter_(\d+)", name)[1])  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--non-persistent-ckpt-type")
    parser.add_argument("--non-persistent-global-ckpt-dir")
    parser.add_argument("--non-persistent-local-ckpt-dir")
    parser.add_argument("--ckpt-step", type=int)
    parser.add_argument("--clean", nargs="+", default=[])
    parser.add_argument("--save-local", nargs="+", type=int, default=[])
    given = parser.parse_args()
    newest_megatron.put_first()
    with cpu_rank():
        print(picked(given.run, SimpleNamespace(**vars(given), exit_on_missing_checkpoint=True)))
    sys.stdout.flush()
    os._exit(0)  # an exit that ends the threads of these libraries was once an abort


if __name__ == "__main__":
    main()
