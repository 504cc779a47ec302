"""One ZeRO-like shard of 1, 4 and 8 GiB: our surgery against torch.load + edit + torch.save.

Each edit is a process of its own, with the shard dropped from the page cache before it. Ratios are
those of one repetition, and of these the median.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from bench.process import disk_usage, forget, python
from bench.row import Row, ratio

SIZES: dict[float, tuple[int, float]] = {1: (3, 100), 4: (1, 100), 8: (1, 1000)}
"""GiB → repetitions, and how many times faster we must be."""
QUICK: dict[float, tuple[int, float]] = {0.125: (1, 15)}
EDITS = ("set-lr", "set-beta2", "reset")
OURS = 3
"""Surgeries of each kind in one repetition; the median counts."""


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """All sizes that disk and memory have room for; a small one, once, when `quick`."""
    rows: list[Row] = []
    times: dict[float, dict[str, float]] = {}
    for gib, (repetitions, target) in (QUICK if quick else SIZES).items():
        reason = _no_room(folder, gib)
        if reason:
            say(f"{gib} GiB: skipped: {reason}")
            continue
        root = folder / f"zero-{gib}"
        python("bench.layout", "zero", root, gib)
        found, times[gib] = _one_size(root, gib, (1, 1) if quick else (repetitions, OURS), target)
        say(f"{gib} GiB")
        rows += found
        shutil.rmtree(root)
    if 1 in times and 8 in times:
        for name, large in times[8].items():
            what = f"{name}: our time at 8 GiB / at 1 GiB"
            note = f"{times[1][name] * 1e3:.0f} and {large * 1e3:.0f} ms"
            rows.append(Row(what, large / times[1][name], "×", 2, note=note))
    return rows


def _no_room(folder: Path, gib: float) -> str:
    disk = shutil.disk_usage(folder).free >> 30
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    memory = int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) >> 20
    if disk < 2 * gib + 2:
        return f"the old and the new file need {2 * gib + 2} GiB, and {disk} GiB are free"
    if memory < gib + 2:
        return f"torch.load needs {gib + 2} GiB of memory, and {memory} GiB are available"
    return ""


def _one_size(
    root: Path, gib: float, times: tuple[int, int], target: float
) -> tuple[list[Row], dict[str, float]]:
    shard = next(root.glob("*/*_optim_states.pt"))
    before = _digest(shard)
    ratios: dict[str, list[float]] = {}
    ours: dict[str, list[float]] = {}
    naive: dict[str, list[float]] = {}
    written: dict[str, int] = {}
    for _ in range(times[0]):
        for name in EDITS:
            if name != "set-beta2":  # the same load and save as for set-lr
                naive.setdefault(name, []).append(_naive(shard, name))
            whole = naive[name if name in naive else "set-lr"][-1]
            done: dict[str, list[float]] = {}
            for _ in range(times[1]):
                usage = disk_usage(root)
                done.setdefault(name, []).append(_surgery(root, shard, name))
                written[name] = max(written.get(name, 0), disk_usage(root) - usage)
                done.setdefault(f"undo {name}", []).append(_surgery(root, shard, "undo"))
            for key, seconds in done.items():
                ratios.setdefault(key, []).append(whole / statistics.median(seconds))
                ours.setdefault(key, []).extend(seconds)
    typed = python("ckptsurgeon", "set-lr", "3e-5", "-C", root, "--yes", "--quiet")
    python("ckptsurgeon", "undo", "-C", root, "--yes", "--quiet")
    if _digest(shard) != before:
        raise RuntimeError(f"{shard} is not what it was before the surgeries")
    middle = {name: statistics.median(values) for name, values in ours.items()}
    rows = []
    for name in (*EDITS, *(f"undo {name}" for name in EDITS)):
        base = name.removeprefix("undo ")
        whole = statistics.median(naive[base if base in naive else "set-lr"])
        spread = f"[{min(ratios[name]):,.0f}, {max(ratios[name]):,.0f}]"
        note = f"{spread}  {whole:.1f} s / {middle[name] * 1e3:.0f} ms"
        least = 100 if name.startswith("undo") else target
        rows.append(ratio(f"{gib} GiB: {name}", statistics.median(ratios[name]), least, note))
    for name in EDITS:
        rows.append(Row(f"{gib} GiB: {name}: disk taken", written[name] / 1024, "KiB", 1024))
    whole = statistics.median(naive["set-lr"])
    note = f"{whole:.1f} s without import torch / {typed.seconds:.2f} s from start to end"
    rows.append(ratio(f"{gib} GiB: set-lr as it is typed", whole / typed.seconds, None, note))
    return rows, middle


def _naive(shard: Path, name: str) -> float:
    forget([shard])
    seconds = float(python("bench.naive", shard, name).answer["seconds"])
    shard.with_name(f"{shard.name}.new").unlink()
    os.sync()  # ours is not to wait for what is left to do with that file
    return seconds


def _surgery(root: Path, shard: Path, name: str) -> float:
    forget([shard])
    return float(python("bench.surgeon", root, name).answer["seconds"])


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        digest = hashlib.sha256()
        while piece := opened.read(1 << 24):
            digest.update(piece)
        return digest.hexdigest()
