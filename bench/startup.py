"""What a user waits for beside the work itself: `--help`, `status`, `ready` and `set` of a small
run, and `ready` of one with many shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from bench.process import python
from bench.row import Row

TIMES = 20
SHARDS = 64


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """The best of some starts, against Python's own in the same run: the rest is the machine's."""
    root = folder / "three"
    python("bench.layout", "three", root, 3)
    many, shards = folder / "many", 8 if quick else SHARDS
    python("bench.layout", "many", many, shards)
    times = 3 if quick else TIMES
    commands: dict[str, tuple[tuple[object, ...], float]] = {
        "--help": (("--help",), 5),
        "status, 3 checkpoints": (("status", "-C", root), 8),
        "ready, 3 checkpoints": (("ready", "-C", root), 8),
        f"ready, {shards} shards": (("ready", "-C", many), 16),
        "set … --yes, 3 checkpoints": (("set", "--yes", "-C", root), 10),
    }
    bare, best = float("inf"), dict.fromkeys(commands, float("inf"))
    for i in range(times):
        bare = min(bare, python("-c", "pass").seconds)
        for what, (words, _) in commands.items():
            more = [f"eps=1e-{8 + i % 2}"] if words[0] == "set" else []  # never what is there
            best[what] = min(best[what], python("ckptsurgeon", *words, *more).seconds)
    shutil.rmtree(root)
    shutil.rmtree(many)
    note = f"python -c pass: {bare * 1000:.0f} ms; best of {times}"
    return [
        Row(f"start-up: {what}", best[what] / bare, "×", target, note=note)
        for what, (_, target) in commands.items()
    ]
