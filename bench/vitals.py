"""`doctor --vitals` on two large shards: speed of one thread, against a cold disk, and memory.

From the page cache it is CPU time that counts, of the whole command less that of one without
--vitals; from the disk it is the wall clock of both, beside a plain read by as many threads.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.process import forget, python
from bench.row import Row

GIB = 2.0
TIMES = 5
PIECE = 1 << 20


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """All rows; a few of the bytes, once, when `quick`."""
    root, gib = folder / "moments", GIB / 32 if quick else GIB
    python("bench.layout", "moments", root, f"{gib}x2")
    files = sorted(root.glob("*/*.pt"))
    size = sum(file.stat().st_size for file in files)
    say(f"built {size / 1e9:.1f} GB")
    command = ("ckptsurgeon", "doctor", "--quiet", "-C", root, "--jobs")
    speeds, peaks, shares = [], [], []
    for _ in range(1 if quick else TIMES):
        bare = python(*command, 1).cpu
        _read(files, 1)  # into the page cache
        seen = python(*command, 1, "--vitals")
        speeds.append(size / (seen.cpu - bare) / 1e9)
        forget(files)
        plain = _read(files, len(files))
        forget(files)
        cold = python(*command, len(files), "--vitals")
        idle = python(*command, 1).seconds
        peaks.append(max(seen.peak_mb, cold.peak_mb))
        shares.append(plain / (cold.seconds - idle))
    shutil.rmtree(root)
    note = f"{size / 1e9:.1f} GB, CPU time, median of {len(speeds)}"
    share = statistics.median(shares)
    return [
        Row("vitals: a thread, from the page cache", statistics.median(speeds), "GB/s", 1.5,
            at_least=True, note=note),
        Row("vitals: speed on a cold disk, of a plain read's", share, "×", 0.6, at_least=True),
        Row("vitals: peak memory", max(peaks), "MB", 512),
    ]  # fmt: skip


def _read(files: list[Path], threads: int) -> float:
    """Seconds in which so many threads read all bytes."""

    def read(file: Path) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while os.read(descriptor, PIECE):
                pass
        finally:
            os.close(descriptor)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, files))
    return time.perf_counter() - began
