"""Prints what torchtitan's trainer uses after it loaded a step from a bucket by fsspec, as JSON.

Usage: python -m tests.remote.read_by_fsspec s3://BUCKET/RUN
"""

from __future__ import annotations

import json
import sys

import fsspec
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from tests.support.dcp_trainers import loaded_titan


def main() -> None:
    address = sys.argv[1]
    files = fsspec.filesystem("s3")
    folders = [path.rpartition("/")[2] for path in files.ls(address)]
    saved = [
        int(name.partition("-")[2])
        for name in folders
        if name.startswith("step-") and files.isfile(f"{address}/{name}/.metadata")
    ]  # as torchtitan finds its latest step
    step = max(saved)
    used = loaded_titan(FsspecReader(f"{address}/step-{step}")).used()
    print(json.dumps({"step": step, **used}))


if __name__ == "__main__":
    main()
