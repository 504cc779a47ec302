"""The file at which a trainer saves and ends, and whether one that is there is of somebody gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.hints import again, shell
from ckptsurgeon.run import slurm_job
from ckptsurgeon.run.run import CONFIG, Run
from ckptsurgeon.transaction import lock
from ckptsurgeon.transaction.names import ID

KEY = "kill_switch_path"
"""What the bundled trainer calls it."""
JOB, MARK = "job", "watch"
"""What one says that a job put there, before its number, and one of a watch, before that of its
event. Whatever else one says, a person put it there."""
LONGEST = 100
"""Bytes of what a job or a watch writes there, or fewer."""


def kill_switch(run: Run) -> Path | None:
    """The file at which the trainer saves and ends, where it is known that it looks for one."""
    own = run.settings.get("relaunch")
    if isinstance(own, dict):
        switch = own.get("kill_switch")
    elif disk.is_file(run.root / CONFIG):
        switch = plain_yaml.read(run.root / CONFIG).get(KEY)
    else:
        switch = None
    return None if switch is None else run.root / str(switch)


def clear_left(run: Run, argv: Sequence[str]) -> str:
    """Remove the kill switch that `argv` or the run names, if the job or the watch that left it is
    gone: the trainer would save and end at its first iteration. A sentence that says so, or
    nothing. One that a person put there stays, and so does one of the job that asks.

    Raises SurgeryError where it is of another job, or of a watch, which may still be there."""
    named = [word.partition("=")[2] for word in argv if word.startswith(f"{KEY}=")]
    switch = Path(named[-1]) if named else kill_switch(run)
    if switch is None or not disk.is_file(switch):
        return ""
    try:
        words = whole_file.read(switch, LONGEST).decode("utf-8", "replace").split()
    except OSError:  # longer, or gone since
        return ""
    mark, number = words if len(words) == 2 else ("", "")
    if mark == JOB and slurm_job.NUMBER.fullmatch(number):
        if slurm_job.own(number):
            return ""
        who, there = f"job {number}", slurm_job.left(number)
    elif mark == MARK and ID.fullmatch(number):
        who = "a watch"
        holder = lock.alive(run.root, lock.WATCHER)
        there = "" if holder is None else f"is there: {holder}"
    else:
        return ""
    if there:
        raise SurgeryError(
            f"{switch}: {who} put this kill switch there, and {there}",
            untouched="no trainer was started: it would save and end at once",
            next=(again(why="once that has ended"), shell(["rm", switch], why="if that is gone")),
        )
    disk.remove_file(switch)
    return f"{switch}: {who} left this kill switch, and is gone: removed"
