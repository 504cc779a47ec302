"""--on slurm: the tasks of an srun become scheduler, surgeon and workers; the script for sbatch.
--ranks-from-env: they share the work among themselves."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import TYPED, again, shell

if TYPE_CHECKING:
    from ckptsurgeon.transaction.ranks import Ranks, Told

SLURM = "slurm"
"""What --on takes for the tasks of an srun."""
RANKS = "--ranks-from-env"
ROLES = 3
"""Tasks that it takes at least: scheduler, surgeon, worker."""


class _Task(NamedTuple):
    """A task of an srun, of how many, and the name of this start of its job alone: a requeued one
    would find what the one before it has left."""

    number: int
    of: int
    start: str


def _task() -> _Task | None:
    """The one that this process is; None outside of an srun."""
    named = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")
    job, step, number, of = (os.environ.get(name, "") for name in named)
    if not all(each.isdecimal() for each in (job, step, number, of)) or int(number) >= int(of):
        return None
    restart = os.environ.get("SLURM_RESTART_COUNT") or 0
    return _Task(int(number), int(of), f"{job}-{step}-{restart}")


def ranks(told: Told | None = None) -> Ranks:
    """What this process is for --ranks-from-env. Raises UsageError outside of an srun."""
    from ckptsurgeon.transaction.ranks import Ranks

    task = _task()
    if task is None:
        raise UsageError(
            f"{RANKS} is for the tasks of an srun",
            next=(
                again("--sbatch", "ntasks=8"),
                again(without=[RANKS], why="with threads of this process"),
            ),
        )
    return Ranks(task.number, task.of, task.start, told)


def join() -> tuple[Path, Callable[[], None]]:
    """Become what this task of the srun is. The scheduler and the workers end here, with the
    surgeon; that one gets the scheduler's file, and what ends the others.

    Raises UsageError outside of an srun, or in one of too few tasks."""
    try:
        from dask_jobqueue.slurm import SLURMRunner
    except ImportError:
        raise UsageError(
            "--on slurm needs dask-jobqueue, which is not installed",
            next=shell(["pip", "install", "ckptsurgeon[cluster]"]),
        ) from None
    task = _task()
    if task is None:
        raise UsageError(
            "--on slurm is for the tasks of an srun", next=again("--sbatch", "ntasks=8")
        )
    if task.of < ROLES:
        raise UsageError(
            f"--on slurm needs {ROLES} tasks: scheduler, surgeon, workers",
            next="srun --ntasks N, of which N - 2 are workers",
        )
    file = Path.cwd() / f"dask-{task.start}.json"
    own = {"dashboard": False, "port": 0}
    try:
        runner: Any = SLURMRunner(
            scheduler_file=str(file), scheduler_options=own, worker_options={"dashboard": False}
        )
    except KeyboardInterrupt:  # how its scheduler and its workers end
        raise typer.Exit(0) from None

    def end() -> None:
        with suppress(OSError, RuntimeError):
            runner.close()
        with suppress(OSError):
            disk.remove_file(file)

    return file, end


def script(ctx: typer.Context, options: Sequence[str]) -> str:
    """What sbatch takes to run the command that was typed on its tasks, and again if it is
    requeued. Raises UsageError for an option that a line of it can't hold, and without --on slurm
    or --ranks-from-env."""
    from ckptsurgeon.launch.slurm import refuse_odd

    words = _without(TYPED.get().words, "--sbatch")
    shared = RANKS in words
    if not shared and f"--on={SLURM}" not in words and ("--on", SLURM) not in pairwise(words):
        raise UsageError(
            f"--sbatch belongs to --on slurm, or to {RANKS}",
            next=(again("--on", SLURM, why="with Dask"), again(RANKS, why="without it")),
        )
    refuse_odd(options)
    given = {option.partition("=")[0] for option in options}
    tasks = [] if given & {"ntasks", "ntasks-per-node", "nodes"} else [f"ntasks={ROLES + 1}"]
    lines = [f"job-name=ckptsurgeon-{ctx.info_name}", "open-mode=append", "requeue", *tasks]
    lines = [line for line in lines if line.partition("=")[0] not in given]
    # A job has no terminal to confirm on, and does not begin anew what it was requeued in. What
    # does not compute only reads or exports: it asks nobody, and begins anew.
    computes = any("--resume" in parameter.opts for parameter in ctx.command.params)
    wanted = ("--resume",) if "-y" in words else ("--yes", "--resume")
    more = [option for option in wanted if computes and option not in words]
    # Without a scheduler nobody would tell the others that the last one has ended.
    srun = ["srun", *["--kill-on-bad-exit=1"] * shared, "ckptsurgeon", *words, *more]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{line}" for line in (*lines, *options)),
            "",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
            f"exec {shlex.join(srun)}",
        ]
    )


def _without(words: Sequence[str], option: str) -> list[str]:
    """The words without an option and its values."""
    kept, skipped = [], False
    for word in words:
        if not skipped and word != option and not word.startswith(f"{option}="):
            kept.append(word)
        skipped = not skipped and word == option
    return kept
