"""The same edit as everyone does it: torch.load, change the dict, torch.save, fsync.

Only those are timed, not the interpreter and `import torch`. The new file is left beside the old
one, which spares it the rename. Usage: python -m bench.naive SHARD set-lr|reset
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed.utils.tensor_fragment  # noqa: F401  # what the shards name
import torch


def main() -> None:
    """Carry it out and print seconds and CPU seconds as JSON."""
    shard, name = Path(sys.argv[1]), sys.argv[2]
    began, cpu = time.perf_counter(), time.process_time()
    state = torch.load(shard, map_location="cpu", weights_only=False)
    adam = _adam(state)
    if name == "reset":
        for values in adam["state"].values():
            values["exp_avg"].zero_()
            values["exp_avg_sq"].zero_()
            values["step"] = values["step"] * 0
    else:
        for group in adam["param_groups"]:
            group["lr"] = 3e-5
    new = shard.with_name(f"{shard.name}.new")
    torch.save(state, new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    print(json.dumps({"seconds": seconds, "cpu": used}))


def _adam(state: dict[str, Any]) -> dict[str, Any]:
    """The dict with state and param_groups of a ZeRO or a stage-0 file."""
    if state.get("optimizer") is not None:
        return dict(state["optimizer"])
    outer = state["optimizer_state_dict"]
    return dict(outer.get("base_optimizer_state") or outer["optimizer_state_dict"])


if __name__ == "__main__":
    main()
