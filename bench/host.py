"""What the trainer costs the host beside the model: against a bare loop over the same layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.pairs import ratios, summary
from bench.process import python
from bench.row import Row

KINDS = (
    ("bf16, ZeRO 1", (), 1.3),
    ("fp32, ZeRO 1", ("dtype=fp32",), None),
    ("bf16, ZeRO 2", ("zero_stage=2",), None),
)


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Medians of ratios of CPU time, iteration by iteration, of 24 layers without arithmetic."""
    rows = []
    for what, overrides, target in KINDS[: 1 if quick else None]:
        own = folder / f"host-{what.replace(', ', '-').replace(' ', '-')}"
        own.mkdir()
        times = python("bench.host_time", own, 5 if quick else 40, *overrides).answer
        median, least, most = summary(ratios(times["trainer"], times["bare"]))
        note = f"[{least:.2f}, {most:.2f}]  {min(times['trainer']) * 1e3:.0f} ms"
        note += f" / {min(times['bare']) * 1e3:.0f} ms"
        rows.append(
            Row(f"host time, 24 layers, {what}: times a bare loop", median, "×", target, note=note)
        )
        say(f"{what} {median:.2f}")
    return rows
