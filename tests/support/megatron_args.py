"""What Megatron-LM makes of the arguments that the checkpoint of a RUN saves.

By `load_args_from_checkpoint` and `check_checkpoint_args` of the newest `megatron.training`.
"""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

from tests.support import newest_megatron
from tests.support.cpu_rank import cpu_rank


class Launch(SimpleNamespace):
    """A command line: what is not on it is None, as in argparse's result."""

    def __getattr__(self, name: str) -> None:
        return None


def told(run: str) -> dict[str, Any]:
    """The batch size after a load of the arguments, with and without one on the command line; and
    the sizes with which the check of the saved ones passes a phase transition."""
    from megatron.training import checkpointing

    out: dict[str, Any] = {}
    for size in (None, 32):
        args = Launch(load=run, exit_on_missing_checkpoint=True, global_batch_size=size)
        checkpointing.load_args_from_checkpoint(args)
        out[str(size)] = args.global_batch_size
    launch = Launch(load=run, exit_on_missing_checkpoint=True)
    state = checkpointing._load_base_checkpoint(run, launch, rank0=True)[0]
    checkpointing.set_checkpoint_version(3.0)
    passed = []
    for size in (8, 16, 32):
        given = {**vars(state["args"]), "global_batch_size": size, "use_dist_ckpt": True}
        args = Launch(**given, phase_transition_iterations=[10])
        checkpointing.get_args = lambda args=args: args
        try:
            checkpointing.check_checkpoint_args(state["args"])
        except AssertionError:
            continue
        passed.append(size)
    return {**out, "passed": passed, "consumed": state["args"].consumed_train_samples}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    given = parser.parse_args()
    newest_megatron.put_first()
    with cpu_rank():
        print(json.dumps(told(given.run)))


if __name__ == "__main__":
    main()
