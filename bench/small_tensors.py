"""One file with 10,000 small tensors: CPU time against torch.load + edit + torch.save.

The least CPU time of some rounds on both sides: other load on the machine only adds to it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from bench.process import python
from bench.row import Row, ratio

ROUNDS = 5
EDITS = ("set-lr", "set-beta2", "reset")
TARGETS = {"set-lr": 10.0, "reset": 8.0}


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """ZeRO-3 shards, with tensors as long as BLOOM's biases and layer norms, and with short ones;
    and a stage-0 file, in which each parameter has a step of its own, which must be read.

    A reset makes a record of zeros of each moment: with short tensors they are written."""
    rows = []
    for kind, size, what, edits in (
        ("small", "9999x2500", "9,999 tensors of 10 kB, ZeRO-3", EDITS),
        ("small", "9999x14336", "9,999 tensors of 56 KiB, ZeRO-3", EDITS),
        ("parameters", "10000x2500", "10,000 tensors of 10 kB, stage 0", EDITS),
    )[: 1 if quick else None]:
        root = folder / f"{kind}-{size}"
        python("bench.layout", kind, root, size)
        shard = max(root.glob("*/*.pt"), key=lambda path: path.stat().st_size)
        for name in edits[: 1 if quick else None]:
            rows.append(_one(root, shard, name, f"CPU: {what}: {name}", 1 if quick else ROUNDS))
            say(f"{kind} {size} {name}")
        shutil.rmtree(root)
    return rows


def _one(root: Path, shard: Path, name: str, what: str, rounds: int) -> Row:
    naive, ours = [], []
    for _ in range(rounds):
        like = "reset" if name == "reset" else "set-lr"
        naive.append(python("bench.naive", shard, like).answer["cpu"])
        shard.with_name(f"{shard.name}.new").unlink()
        ours.append(python("bench.surgeon", root, name).answer["cpu"])
        python("bench.surgeon", root, "undo")
        shutil.rmtree(root / ".ckptsurgeon")  # no round reads the receipts of those before it
    pairs = [whole / part for whole, part in zip(naive, ours, strict=True)]
    spread = f"[{min(pairs):.1f}, {max(pairs):.1f}]"
    note = f"{spread}  {min(naive):.2f} s / {min(ours) * 1e3:.0f} ms"
    return ratio(what, min(naive) / min(ours), TARGETS[like], note)
