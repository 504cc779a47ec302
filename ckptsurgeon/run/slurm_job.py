"""Whether a SLURM job runs, by what `squeue` says. Starts that one program and changes nothing."""

from __future__ import annotations

import os
import re
import subprocess

ENDED = {
    "PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "COMPLETED", "CANCELLED",
    "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "REVOKED",
}  # fmt: skip
"""States in which no process of a job is left, or none is started yet; squeue(1)."""
NUMBER = re.compile(r"\d{1,18}")
WAIT_S = 10
"""Seconds after which an answer no longer comes: a controller that is down answers nobody."""


def running(job: object) -> str | None:
    """The state of a job that has processes, and its nodes, as `squeue` says it; None for a job
    that has none, that this process is a part of, or that nobody here can ask for."""
    if not isinstance(job, str) or not NUMBER.fullmatch(job):
        return None
    if job == os.environ.get("SLURM_JOB_ID"):
        return None
    words = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %N"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=WAIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        state, _, nodes = line.strip().partition(" ")
        if state and state not in ENDED:
            return f"{state} on {nodes}" if nodes else state
    return None
