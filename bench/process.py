"""Runs one fresh process and measures it: what a user would wait for and need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent


@dataclass(frozen=True)
class Finished:
    """`seconds` from start to end, `cpu` user and system time, `peak_mb` its largest memory;
    `answer` is the JSON of its last line of output, if that is what it is."""

    seconds: float
    cpu: float
    peak_mb: float
    answer: dict[str, Any]


def python(*words: object, cores: int | None = None) -> Finished:
    """Run `python -m WORDS`, or `python -c CODE`, and wait for it. Raises RuntimeError with what it
    said if it fails."""
    environment = {"DS_ACCELERATOR": "cpu", "NO_COLOR": "1", **os.environ}
    environment["THP_MEM_ALLOC_ENABLE"] = "1"  # as the trainer sets it for itself
    environment["OMP_NUM_THREADS"] = str(os.cpu_count())
    command = [sys.executable, *(() if words[0] == "-c" else ("-m",)), *map(str, words)]
    if cores is not None:
        kept = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
        command = ["taskset", "-c", kept, *command]
    # The kernel counts a parent's memory as its child's peak until the child has begun; so a small
    # process starts the measured one, whatever has called this.
    starter = [sys.executable, "-S", str(Path(__file__)), *command]
    done = subprocess.run(starter, cwd=REPO, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode:
        said = "\n".join([*lines[-20:], done.stderr[-4000:]])
        raise RuntimeError(f"{' '.join(map(str, words))}: exit {done.returncode}\n{said}")
    seconds, cpu, peak_mb = map(float, lines.pop().split())
    answer = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    return Finished(seconds, cpu, peak_mb, answer)


def _start(command: list[str]) -> int:
    """Run the command; the last line of output is its seconds, CPU seconds and peak in MB."""
    began = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    print(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
    return process.returncode


def forget(files: Iterable[Path]) -> None:
    """Drop the pages of these files from the cache, so that the next reader reads the disk."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_usage(folder: Path) -> int:
    """Bytes that the file system has given to everything in `folder`."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


if __name__ == "__main__":
    sys.exit(_start(sys.argv[1:]))
