"""Trains by Megatron-Bridge's own loop, and prints what each update used; what it prints before is
the trainer's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support import bridge_loop
from tests.support.cpu_rank import cpu_rank, end_workers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("stop", type=int, help="the iteration after which it ends")
    parser.add_argument("settings", nargs="*", help="of its config: section.key=value")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    bridge_loop.begin()
    try:
        with cpu_rank():
            used = bridge_loop.run(
                wanted.root, [f"train.exit_interval={wanted.stop}", *wanted.settings]
            )
            if dist.get_rank() == 0:
                print(json.dumps(used), flush=True)
    finally:
        end_workers()


if __name__ == "__main__":
    main()
