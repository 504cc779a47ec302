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


UNKNOWN = "Invalid job id specified"
"""What squeue says of a job that its controller has forgotten."""


def running(job: object) -> str | None:
    """The state of a job that has processes, and its nodes, as `squeue` says it; None for a job
    that has none, that this process is a part of, or that nobody here can ask for."""
    if not isinstance(job, str) or not NUMBER.fullmatch(job) or own(job):
        return None
    said = _asked(job)
    return None if said is None else _state(said.stdout) if said.returncode == 0 else None


def own(job: str) -> bool:
    """Whether this process is a part of it."""
    return job == os.environ.get("SLURM_JOB_ID")


def left(job: str) -> str:
    """Why processes of a job may be left, as the end of a sentence; empty where `squeue` says that
    there are none, or knows no such job."""
    said = _asked(job)
    if said is not None and said.returncode == 0:
        state = _state(said.stdout)
        return f"is {state}, squeue says" if state else ""
    if said is not None and UNKNOWN in said.stderr:
        return ""
    return "no squeue here says whether that runs"


def _asked(job: str) -> subprocess.CompletedProcess[str] | None:
    words = ["squeue", "--noheader", f"--jobs={job}", "--format=%T %N"]
    try:
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=WAIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _state(said: str) -> str | None:
    for line in said.splitlines():
        state, _, nodes = line.strip().partition(" ")
        if state and state not in ENDED:
            return f"{state} on {nodes}" if nodes else state
    return None
