"""One surgery through the Python API, timed in its own process: from opening the run to the
verified receipt. Interpreter and imports are not counted, as they are not for torch.

Usage: python -m bench.surgeon RUN set-lr|set-beta2|reset|undo
"""

from __future__ import annotations

import concurrent.futures  # noqa: F401  # imported now, so that no import is timed
import json
import sys
import time
from pathlib import Path

import ckptsurgeon.files.archives.append
import ckptsurgeon.files.archives.compact
import ckptsurgeon.formats.deepspeed.layout
import ckptsurgeon.surgery.undo  # noqa: F401
from ckptsurgeon import Hyperparameters, Recipe, Reset, Run, apply, plan, plan_undo
from ckptsurgeon.operations import kinds

RECIPES = {
    "set-lr": Recipe(Hyperparameters(lr=3e-5)),
    "set-beta2": Recipe(Hyperparameters(beta2=0.9)),
    "reset": Recipe(Reset(reset=["moments"])),
}


def main() -> None:
    """Carry it out and print seconds and CPU seconds as JSON."""
    root, name = Path(sys.argv[1]), sys.argv[2]
    kinds()  # imports every operation, as `plan` does
    began, cpu = time.perf_counter(), time.process_time()
    run = Run.open(root)
    wanted = plan_undo(run) if name == "undo" else plan(run, RECIPES[name])
    apply(run, wanted)
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    print(json.dumps({"seconds": seconds, "cpu": used}))


if __name__ == "__main__":
    main()
