"""Runs of transformers' Trainer of a Llama of any sizes, alone or over DeepSpeed's ZeRO.

`python -m tests.support.generated_llamas JSON`, once for each rank, makes those that it is told:
each has its root, the step that is saved, a seed, how (see `llamas.HOW`), and sizes by the names of
transformers' config.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support import llamas


def main(told: list[dict[str, Any]]) -> None:
    for each in told:
        step = each.pop("step")
        llamas.hugging_face(Path(each.pop("root")), step, saved=[step], **each)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
