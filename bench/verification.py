"""`verify` on many shards, and how fast it reads bytes whose CRC it checks.

Sound is measured as a user types it, from the start of the process to its end, on two cores; the
CRC is that of the standard library, on one thread and on bytes in memory.
"""

from __future__ import annotations

import shutil
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from bench.process import python
from bench.row import Row

SHARDS = 1000
TIMES = 5


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Levels 0 to 2 of a thousand shards of a MiB; a tenth of them, once, when `quick`."""
    root, count = folder / "many", SHARDS // 10 if quick else SHARDS
    python("bench.layout", "many", root, count)
    say(f"built {count} shards")
    times = 1 if quick else TIMES
    runs = [python("ckptsurgeon", "verify", "--quiet", "-C", root, cores=2) for _ in range(times)]
    shutil.rmtree(root)
    seconds = min(run.seconds for run in runs)
    note = f"best of {times}, {min(run.cpu for run in runs):.2f} s CPU"
    rows = [Row(f"verify: {count:,} shards, levels 0 to 2", seconds, "s", 2, note=note)]
    data = bytes(64 << 20)
    speeds = []
    for _ in range(times):
        began = time.perf_counter()
        zlib.crc32(data)
        speeds.append(len(data) / (time.perf_counter() - began) / 1e9)
    what = "verify --level 3: CRC, standard library, a thread"
    rows.append(Row(what, statistics.median(speeds), "GB/s", 2, at_least=True))
    return rows
