"""Measures the figures of docs/figures.md in one run, and fails if one misses what it must reach.

Usage: python -m bench [--write] [--quick] [SUBJECT…]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from bench import (
    average,
    bloom,
    chunks,
    cluster,
    event_files,
    gpu,
    host,
    kernels,
    layers,
    many_shards,
    many_steps,
    offline_wandb,
    picture,
    remote,
    round_trips,
    saves,
    shards,
    signals,
    small_tensors,
    startup,
    tracker_database,
    training,
    transplant,
    verification,
    vitals,
)
from bench.process import REPO
from bench.row import Row, page, table

SUBJECTS: dict[str, Callable[[Path, bool, Callable[[str], None]], list[Row]]] = {
    "startup": startup.measure,
    "bloom": bloom.measure,
    "many_shards": many_shards.measure,
    "many_steps": many_steps.measure,
    "round_trips": round_trips.measure,
    "verification": verification.measure,
    "average": average.measure,
    "transplant": transplant.measure,
    "vitals": vitals.measure,
    "cluster": cluster.measure,
    "small_tensors": small_tensors.measure,
    "shards": shards.measure,
    "chunks": chunks.measure,
    "layers": layers.measure,
    "training": training.measure,
    "kernels": kernels.measure,
    "host": host.measure,
    "signals": signals.measure,
    "saves": saves.measure,
    "gpu": gpu.measure,
    "picture": picture.measure,
    "remote": remote.measure,
    "offline_wandb": offline_wandb.measure,
    "tracker_database": tracker_database.measure,
    "event_files": event_files.measure,  # last: it makes this process larger
}


def main() -> int:
    """Print machine and table; 1 if a target is missed. Targets are for whole runs."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=" ".join(SUBJECTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, once; nothing must pass")
    parser.add_argument("--write", action="store_true", help="write docs/figures.md anew")
    given = parser.parse_args()
    if given.write and (given.quick or given.subjects):
        parser.error("--write needs a whole run")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing large is left behind
    began = time.monotonic()
    command, machine = f"python -m bench {' '.join(sys.argv[1:])}".rstrip(), _machine()
    print(f"command  {command}\nmachine  {machine}", flush=True)
    rows, failed = measure(given.subjects or list(SUBJECTS), given.quick)
    print(table(rows))
    if given.write:
        (REPO / "docs" / "figures.md").write_text(page(command, machine, rows, failed), "utf-8")
    missed = [] if given.quick else [row.what for row in rows if not row.met]
    seconds = time.monotonic() - began
    print(f"{len(rows)} rows in {seconds:.0f} s; missed: {', '.join(missed) or 'none'}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if missed or failed else 0


def measure(subjects: Sequence[str], quick: bool) -> tuple[list[Row], list[str]]:
    """The rows of these subjects, and the names of those that failed: an hour's other rows stay.
    Raises KeyError for another name."""
    base = REPO / ".cache" / "bench"
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=base))
    rows: list[Row] = []
    failed = []
    try:
        for name in subjects:
            say, subject = partial(_say, name), SUBJECTS[name]
            try:
                some = subject(folder, quick, say)
            except Exception:
                traceback.print_exc()
                failed.append(name)
                continue
            say(f"\n{table(some)}")
            rows += some
    finally:
        shutil.rmtree(folder)
    return rows, failed


def _say(subject: str, text: str) -> None:
    print(f"{subject}: {text}", file=sys.stderr, flush=True)


def _machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    above = [str(folder) for folder in (REPO, *REPO.parents)]
    system = max((m for m in mounts if m[1] in above), key=lambda m: len(m[1]))[2]
    load = os.getloadavg()[0]
    return (
        f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {system}, "
        f"torch {metadata.version('torch')}, Python {platform.python_version()}, "
        f"Linux {platform.release().split('-')[0]}, load {load:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
