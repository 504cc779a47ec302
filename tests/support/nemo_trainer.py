"""Trains by NeMo 2's own trainer, and prints what each update used; what it prints before is the
trainer's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from tests.support import nemo_loop
from tests.support.cpu_rank import end_workers
from tests.support.nemo_library import Unpinned


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("stop", type=int, help="the step after which it ends")
    parser.add_argument("settings", nargs="*", help="key=value of nemo_loop.SETTINGS")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    nemo_loop.begin()
    given = {
        key: yaml.safe_load(value) for key, _, value in (w.partition("=") for w in wanted.settings)
    }
    try:
        with Unpinned():
            used = nemo_loop.run(wanted.root, wanted.stop, given)
        print("\n" + json.dumps(used), flush=True)
        dist.destroy_process_group()
    finally:
        end_workers()


if __name__ == "__main__":
    main()
