"""Kills a trainer at each point of a checkpoint that it writes beside training.

Usage: python -m tests.train.killed_saves RUN CORPUS WORK. Each child resumes a copy of RUN, trains
to its next checkpoint, and is killed at one point. Prints point → status and copy as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

from tests.support.in_process import InProcess
from train import distributed
from train.errors import TrainError

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir")
BYTES = (1, 4096, 40_000)
"""Lengths that no file may pass: the kernel kills who writes the next byte."""
OVERRIDES = ["async_save=true", "train_iters=4", "keep_last=2"]


def resume(run: Path, corpus: Path, *overrides: str) -> None:
    """One resume to the end of the run; a refusal goes to a file beside it."""
    distributed.complete_environment()
    try:
        InProcess(corpus, distributed.start(1)).train(run, *OVERRIDES, *overrides)
    except TrainError as e:
        run.with_suffix(".error").write_text(e.render())


def killed_at(point: int, run: Path, corpus: Path) -> None:
    """Resume, and die before the call number `point` that touches the run's folder."""
    left = point

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in EVENTS or not arguments:
            return
        path = str(arguments[0])
        if path.startswith(str(run)) and "tensorboard" not in path:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    resume(run, corpus)


def limited_to(size: int, run: Path, corpus: Path, fatal: bool, *overrides: str) -> None:
    """Resume; from the save on no file may be longer than `size`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if fatal else signal.SIG_IGN)

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.mkdir" and "global_step4" in str(arguments[0]):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    sys.addaudithook(look)
    resume(run, corpus, *overrides)


def main() -> None:
    original, corpus, work = map(Path, sys.argv[1:])
    told: dict[str, tuple[int, str]] = {}

    def child(name: str, act: object, *arguments: object) -> int:
        run = work / name
        shutil.copytree(original, run)
        pid = os.fork()
        if not pid:
            act(*arguments[:1], run, corpus, *arguments[1:])  # type: ignore[operator]
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        told[name] = (status, str(run))
        return status

    point = 1
    while child(f"call-{point}", killed_at, point):
        point += 1
    for size in BYTES:
        child(f"byte-{size}", limited_to, size, True)
    child("full", limited_to, 60_000, False)
    child("full-at-once", limited_to, 60_000, False, "async_save=false")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
