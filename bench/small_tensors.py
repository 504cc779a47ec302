"""One shard with 10,000 small tensors: CPU time against torch.load + edit + torch.save."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from bench.process import python
from bench.row import Row, ratio

REPETITIONS = 5


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """A ZeRO-3 shard of 9,999 tensors of 32 KiB, and one stage-0 file of 10,000 for comparison:
    there each parameter has a step of its own, which must be read."""
    rows = []
    for kind, what, target in (
        ("small", "CPU: 9,999 tensors of 32 KiB, ZeRO-3", 10.0),
        ("parameters", "CPU: 10,000 tensors, 2,500 steps, stage 0", None),
    )[: 1 if quick else None]:
        root = folder / kind
        python("bench.layout", kind, root, 10_000)
        shard = max(root.glob("*/*.pt"), key=lambda path: path.stat().st_size)
        pairs = []
        for _ in range(1 if quick else REPETITIONS):
            naive = python("bench.naive", shard, "set-lr").answer["cpu"]
            shard.with_name(f"{shard.name}.new").unlink()
            pairs.append((naive, python("bench.surgeon", root, "set-lr").answer["cpu"]))
            python("bench.surgeon", root, "undo")
        ratios = [naive / ours for naive, ours in pairs]
        whole, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        spread = f"[{min(ratios):.1f}, {max(ratios):.1f}]"
        note = f"{spread}  {whole:.2f} s / {ours * 1e3:.0f} ms"
        rows.append(ratio(what, statistics.median(ratios), target, note))
        shutil.rmtree(root)
        say(kind)
    return rows
