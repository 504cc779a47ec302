"""Processes that fight for one lock, and die with it in their hands now and then."""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.transaction import lock


def contend(root: Path, wanted: int, seed: int) -> tuple[int, int]:
    """Take the lock `wanted` times. Returns how often it was held, and how often not alone.

    Every 50th time, a child takes it and exits without releasing it: a stale lock."""
    chance = random.Random(seed)
    held = shared = 0
    while held < wanted:
        if chance.random() < 0.02:
            child = os.fork()
            if child == 0:
                with suppress(SurgeryError, OSError), lock.hold(root, "dies"):
                    os._exit(3 if _alone(root) else 4)
                os._exit(0)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            held += ended in (3, 4)
            shared += ended == 4
            continue
        try:
            with lock.hold(root, "contends"):
                held += 1
                shared += not _alone(root)
        except SurgeryError:
            time.sleep(chance.random() * 0.01)
    return held, shared


def _alone(root: Path) -> bool:
    """Whether nobody else is between these two lines."""
    witness = root / "witness"
    try:
        os.close(os.open(witness, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    time.sleep(0)
    with suppress(FileNotFoundError):
        witness.unlink()
    return True


def wait_with_lock(root: Path) -> None:
    """Say "held" and keep the lock until stdin ends, or say "refused"."""
    try:
        with lock.hold(root, "waits"):
            print("held", flush=True)
            sys.stdin.read()
    except SurgeryError:
        print("refused", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        wait_with_lock(Path(sys.argv[2]))
    else:
        print(*contend(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
