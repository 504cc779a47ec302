"""Vitals, average and transplant by 1, 2 and 4 workers of a Dask cluster on this machine, and the
model of docs/scale.md beside them: the time that it says for these workers, over that measured.

Each worker has one thread, and is a process. Files are dropped from the page cache before. More
workers than cores share those, and the model says so. The runs are as large as the disk allows, and
each row names their size. What is read is there in full, since holes are read in no time; the step
that a transplant replaces is all holes, since nobody reads it. As a script it prints what the model
says of an average of 5 steps of so many TB:
python -m bench.cluster TB GB_PER_NODE GB_OF_SYSTEM NODES…
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.average import STEPS, undo
from bench.process import forget, python
from bench.row import Row

WORKERS = (1, 2, 4)
TIMES = 3
"""Up to 8 GiB; larger runs are measured once."""
RANKS = 16
OVERHEAD = 0.005
"""Seconds that scheduler and surgeon spend on a job: 3,000 empty ones took 4.5 ms each, on two busy
cores."""
SIZES = (32, 16, 8, 4)
"""GiB of tensors in each run: the first for which there is room."""
ROOM = 2.1
"""How many times as much is needed: for a transplant the source, and what is written."""
SMALL = 16
"""A run of so small a part of the bytes takes what does not grow with them."""


@dataclass(frozen=True)
class Model:
    """Seconds of a pass: `start` once; for each job `overhead`, in one place; its bytes through a
    worker at `worker` bytes a second; all bytes through the file system at `system`."""

    start: float
    overhead: float
    worker: float
    system: float

    def seconds(self, size: float, jobs: int, workers: int) -> float:
        """Of so many bytes, read and written together."""
        return self.start + max(
            jobs * self.overhead, size / (self.worker * workers), size / self.system
        )


def measure(folder: Path, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """With 4 to 32 GiB of tensors in each run, or 0.25 when `quick`. No row without Dask."""
    try:
        import distributed  # noqa: F401
    except ImportError:
        say("skipped: Dask is not installed (make test-cluster installs it)")
        return []
    sizes, cores = (0.25,) if quick else SIZES, len(os.sched_getaffinity(0))
    free = shutil.disk_usage(folder).free / 2**30 - 1
    gib = next((size for size in sizes if ROOM * size <= free), None)
    if gib is None:
        say(f"skipped: {ROOM * sizes[-1] + 1:g} GiB of free space are needed")
        return []
    rows = [_overhead(folder, 100 if quick else 1000)]
    for name, one in (("vitals", _vitals), ("average", _average), ("transplant", _transplant)):
        (small,) = one(folder, gib / SMALL, (1,), 1)
        seconds = one(folder, gib, WORKERS, 1 if quick or gib > 8 else TIMES)
        rows += _rows(f"{name} of {gib:g} GiB", small, seconds, cores)
        say(f"{name}: {', '.join(f'{each:.1f} s' for each in seconds)}")
    return rows


def _rows(name: str, small: float, seconds: Sequence[float], cores: int) -> list[Row]:
    rows = []
    for workers, taken in list(zip(WORKERS, seconds, strict=True))[1:]:
        model = small + (seconds[0] - small) / min(workers, cores)
        note = f"{taken:.1f} s, one: {seconds[0]:.1f} s; the model says {model:.1f} s"
        rows.append(Row(f"{name}: {workers} workers on {cores} cores, one's time over theirs",
                        seconds[0] / taken, "×", note=note))  # fmt: skip
        rows.append(Row(f"{name}: {workers} workers, the model's time over theirs",
                        model / taken, "×"))  # fmt: skip
    return rows


@contextmanager
def _cluster(workers: int) -> Any:
    """The address of a scheduler with so many workers."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        yield cluster.scheduler_address


def _timed(
    root: Path,
    workers: Sequence[int],
    times: int,
    words: Sequence[object],
    back: Callable[[], None],
) -> list[float]:
    """The median seconds of the command by so many workers; `back` takes back what it did."""
    medians = []
    for count in workers:
        seconds = []
        with _cluster(count) as address:
            for _ in range(times):
                forget(sorted(root.rglob("*.pt")))
                began = time.perf_counter()
                python("ckptsurgeon", *words, "--on", address)
                seconds.append(time.perf_counter() - began)
                back()
        medians.append(statistics.median(seconds))
    return medians


def _vitals(folder: Path, gib: float, workers: Sequence[int], times: int) -> list[float]:
    root = folder / "cluster-vitals"
    python("bench.layout", "moments", root, f"{gib}x{RANKS}")
    words = ("doctor", "--vitals", "--quiet", "-C", root)
    found = _timed(root, workers, times, words, lambda: None)
    shutil.rmtree(root)
    return found


def _average(folder: Path, gib: float, workers: Sequence[int], times: int) -> list[float]:
    root = folder / "cluster-average"
    python("bench.average", "build", root, gib / len(STEPS))
    words = ("average", *STEPS, "--moments", "average", "--yes", "--quiet", "-C", root)
    found = _timed(root, workers, times, words, lambda: undo(root))
    shutil.rmtree(root)
    return found


def _transplant(folder: Path, gib: float, workers: Sequence[int], times: int) -> list[float]:
    root = folder / "cluster-transplant"
    python("bench.transplant", "spread", root, gib, RANKS)
    run = root / "run"
    words = ("transplant", "--from", root / "source", "--yes", "--quiet", "-C", run)
    found = _timed(root, workers, times, words, lambda: undo(run))
    shutil.rmtree(root)
    return found


def _overhead(folder: Path, count: int) -> Row:
    """Of a surgery's jobs that write a kilobyte each: what one costs, by one worker."""
    from distributed import Client

    from ckptsurgeon.plans.edits import Computed
    from ckptsurgeon.plans.sources import Source
    from ckptsurgeon.transaction import job_list
    from ckptsurgeon.transaction.computing import Place

    root, size = folder / "cluster-jobs", 1024
    root.mkdir()
    (root / "raw").write_bytes(os.urandom(size * count))
    with (root / "new").open("wb") as file:
        file.truncate(size * count)
    places = [
        Place(
            root / "new",
            at,
            Computed("copy", "", size, ((Source("raw", at, at + size, ""),),)),
        )
        for at in range(0, size * count, size)
    ]
    whole, job_list.BATCH = job_list.BATCH, size
    jobs = job_list.of(root, root / "jobs", places)
    job_list.BATCH = whole
    job_list.begin(jobs)
    with _cluster(1) as address, Client(address, set_as_default=False) as client:
        began = time.perf_counter()
        job_list.done(jobs, client.get_executor(pure=False))
        seconds = time.perf_counter() - began
    shutil.rmtree(root)
    return Row("a job of a surgery, beside its bytes", seconds / count * 1000, "ms")


def predicted(size: float, node: float, system: float, nodes: int) -> tuple[float, float]:
    """Seconds of an average of 5 steps of so many bytes each, and of the vitals of one. `node` and
    `system` are bytes a second. Each byte of a step is read five times, written once and read
    back; a job writes 256 MB. A surgery's start and end are planned at 2,000 files."""
    jobs = int(size / (256 << 20)) + 1
    average = Model(60, OVERHEAD, node, system).seconds(size * 7, 2 * jobs, nodes)
    return average, Model(10, OVERHEAD, node, system).seconds(size, 2000, nodes)


if __name__ == "__main__":
    terabytes, node, system, *counts = map(float, sys.argv[1:])
    for count in map(int, counts):
        average, vitals = predicted(terabytes * 1e12, node * 1e9, system * 1e9, count)
        print(f"{count:>4} nodes   average {average:>7,.0f} s   vitals {vitals:>7,.0f} s")
