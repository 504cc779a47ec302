"""The run's folder: which checkpoint `latest` names, the config kept there, the live marker."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import TrainError

LATEST = "latest"
LATEST_ITERATION = "latest_checkpointed_iteration.txt"
MARKER = "trainer.pid"
FRESH = "python -m train … --from-scratch    start a new run in a folder without checkpoints"


def write_atomically(path: Path, text: str) -> None:
    """Write beside, sync, rename: a reader sees the old text or the new one."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    partial.replace(path)


def find_checkpoint(root: Path, from_scratch: bool) -> Path | None:
    """The checkpoint to resume from; None for a new run, which only `from_scratch` allows.

    Raises TrainError when `latest` is missing or names nothing: the trainer never falls back to
    random weights.
    """
    steps = checkpoints(root)
    latest = root / LATEST
    if from_scratch:
        if steps or latest.exists():
            found = steps[-1] if steps else LATEST
            raise TrainError(
                f"{root}: --from-scratch, but the folder holds {found}; two runs would mix",
                next=("leave out --from-scratch to resume", "or choose another save=DIR"),
            )
        return None
    if not latest.is_file():
        if not steps:
            raise TrainError(f"{root}: no checkpoint and no {LATEST} here", next=FRESH)
        raise TrainError(
            f"{latest}: missing, but {len(steps)} checkpoints are here, the last {steps[-1]}",
            next=(
                "ckptsurgeon repair-latest",
                f"or write the name of a checkpoint, such as {steps[-1]}, into {LATEST}",
            ),
        )
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    checkpoint = root / tag
    if not tag or "/" in tag or not checkpoint.is_dir():
        here = f"here are {', '.join(steps[-3:])}" if steps else "no checkpoint is here"
        raise TrainError(
            f"{latest}: names {tag!r}, which is not here; {here}",
            next="ckptsurgeon repair-latest" if steps else FRESH,
        )
    return checkpoint


def checkpoints(root: Path) -> list[str]:
    """The names global_step<N> in the folder, by N."""
    names = [p.name for p in root.glob("global_step*") if p.is_dir()]
    numbered = [n for n in names if re.fullmatch(r"global_step\d+", n)]
    return sorted(numbered, key=lambda name: int(name.removeprefix("global_step")))


def refuse_live_trainer(root: Path) -> None:
    """Raise TrainError when the recorded trainer of this folder is alive on this machine."""
    recorded = _recorded(root / MARKER)
    if recorded is None or not _alive(recorded):
        return
    raise TrainError(
        f"{root / MARKER}: a trainer (pid {recorded['pid']}) is writing to this run",
        next=f"wait for it, or stop it: kill {recorded['pid']}",
    )


@contextmanager
def live_marker(root: Path) -> Iterator[None]:
    """Hold <root>/trainer.pid while the block runs. Raises TrainError when another one holds it."""
    marker = root / MARKER
    mine = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": _boot_id(),
        "start_time": _start_time(os.getpid()),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),  # who is on another node can ask for it
    }
    partial = root / f".{MARKER}.{os.getpid()}.tmp"
    partial.write_text(json.dumps(mine) + "\n", encoding="utf-8")
    try:
        for _ in range(2):
            try:
                os.link(partial, marker)  # atomic, complete, and fails when one is there
                break
            except FileExistsError:
                refuse_live_trainer(root)
                _say_if_elsewhere(marker)
                _set_aside(marker)
        else:
            raise TrainError(
                f"{marker}: another trainer has just started in this run", next="stop one of them"
            )
    finally:
        partial.unlink()
    try:
        yield
    finally:
        if _recorded(marker) == mine:  # on another machine nobody could see that this one lived
            marker.unlink()


def _recorded(marker: Path) -> dict[str, Any] | None:
    try:
        recorded = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return recorded if isinstance(recorded, dict) and "pid" in recorded else None


def _alive(recorded: dict[str, Any]) -> bool:
    return (
        recorded.get("host") == socket.gethostname()
        and recorded.get("boot_id") == _boot_id()
        and recorded.get("start_time") == _start_time(recorded["pid"])
    )


def _set_aside(marker: Path) -> None:
    """Take a dead trainer's marker away; one that has come since it was looked at is put back."""
    aside = marker.with_name(f".{MARKER}.{os.getpid()}.old")
    with suppress(FileNotFoundError):
        marker.rename(aside)
        recorded = _recorded(aside)
        if recorded is not None and _alive(recorded):
            with suppress(FileExistsError):
                os.link(aside, marker)
        aside.unlink()


def _say_if_elsewhere(marker: Path) -> None:
    recorded = _recorded(marker)
    if recorded is not None and recorded.get("host") != socket.gethostname():
        print(
            f"{marker}: left by a trainer on {recorded.get('host')}, which can't be asked from "
            "here; going on",
            file=sys.stderr,
        )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid`; None when it does not run, or no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
