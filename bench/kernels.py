"""The kernels against what torch and DeepSpeed give, in pairs, with huge pages on both sides."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bench.pairs import ratios, summary
from bench.process import python
from bench.row import Row, ratio


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Medians of ratios round by round, with the least and the most. One thread: where the machine
    has other load, a barrier between threads costs more than a pass."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    rows = _optimizer(1_000_003 if quick else 40_000_003, 3 if quick else 11)
    say("optimizer step")
    return rows


def _optimizer(elements: int, rounds: int) -> list[Row]:
    times = python("bench.optimizer_step", elements, rounds).answer
    millions = f"{elements / 1e6:.0f} M"
    rows = []
    for what, slow, fast, target in (
        ("AdamW(fused) + glue", "torch", "ours", 2.3),
        ("DeepSpeedCPUAdam + glue", "deepspeed", "ours", 2.3),
        ("AdamW(fused) + glue, from bf16 gradients", "torch", "ours, bf16 gradients", None),
        ("norm, inf and nan check, torch", "norm, torch", "norm, ours", 2.0),
        ("norm, inf and nan check, DeepSpeed", "norm, deepspeed", "norm, ours", 2.0),
    ):
        rows.append(_row(f"{what}, {millions}", times[slow], times[fast], target))
    shares = ratios(times["read"], times["norm, ours"])
    median, least, most = summary(shares)
    speed = times["bytes"] / min(times["read"]) / 1e9
    note = f"[{least:.2f}, {most:.2f}]  of {speed:.0f} GB/s"
    rows.append(Row("norm check: read bandwidth", 100 * median, "%", 80, True, note))
    return rows


def _row(what: str, slow: list[float], fast: list[float], target: float | None) -> Row:
    median, least, most = summary(ratios(slow, fast))
    note = f"[{least:.1f}, {most:.1f}]  {min(slow) * 1e3:.0f} ms / {min(fast) * 1e3:.0f} ms"
    return ratio(f"kernels: {what}", median, target, note)
