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


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """ZeRO-3 shards, with tensors as long as BLOOM's biases and layer norms, and with short ones;
    and a stage-0 file, in which each parameter has a step of its own, which must be read."""
    rows = []
    for kind, size, what, target in (
        ("small", "9999x14336", "CPU: 9,999 tensors of 56 KiB, ZeRO-3", 10.0),
        ("small", "9999x2500", "CPU: 9,999 tensors of 10 kB, ZeRO-3", None),
        ("parameters", "10000x2500", "CPU: 10,000 tensors of 10 kB, stage 0", None),
    )[: 1 if quick else None]:
        root = folder / f"{kind}-{size}"
        python("bench.layout", kind, root, size)
        shard = max(root.glob("*/*.pt"), key=lambda path: path.stat().st_size)
        naive, ours = [], []
        for _ in range(1 if quick else ROUNDS):
            naive.append(python("bench.naive", shard, "set-lr").answer["cpu"])
            shard.with_name(f"{shard.name}.new").unlink()
            ours.append(python("bench.surgeon", root, "set-lr").answer["cpu"])
            python("bench.surgeon", root, "undo")
        pairs = [whole / part for whole, part in zip(naive, ours, strict=True)]
        spread = f"[{min(pairs):.1f}, {max(pairs):.1f}]"
        note = f"{spread}  {min(naive):.2f} s / {min(ours) * 1e3:.0f} ms"
        rows.append(ratio(what, min(naive) / min(ours), target, note))
        shutil.rmtree(root)
        say(f"{kind} {size}")
    return rows
