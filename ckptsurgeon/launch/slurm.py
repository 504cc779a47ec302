"""The sbatch script of a run: a torchrun on each node, held to the promise, requeued if preempted
or hung.

Every word of a command is quoted by shlex; nothing from the run reaches the shell as code.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ckptsurgeon.errors import UsageError
from ckptsurgeon.plans.frozen import frozen

OPTION = re.compile(r"[a-z][a-z-]*(=[^\s\"'\\]+)?")
"""An option of sbatch, as a line of the script can hold it without quotes."""


@frozen
class Job:
    """What a script is made of. `surgeon` is the command that starts `trainer` and compares its
    first line; `kill_switch` is the file at which the trainer saves and exits, if it has one;
    `options` are sbatch's, without dashes. `hung` is the file that the trainer leaves when it ends
    because it made no progress; then the job is requeued at most `requeues` times. `ready` is the
    command without whose success nothing starts; `watch` the one beside the trainer, which says
    after its end whether it starts again."""

    name: str
    nodes: int
    folder: Path
    surgeon: Sequence[str]
    trainer: Sequence[str]
    kill_switch: Path | None
    options: Sequence[str] = ()
    hung: Path | None = None
    requeues: int = 0
    ready: Sequence[str] = ()
    watch: Sequence[str] = ()


def refuse_odd(options: Sequence[str]) -> None:
    """Raise UsageError for an option of sbatch that a line of a script can't hold."""
    for option in options:
        if not OPTION.fullmatch(option):
            raise UsageError(
                f"--sbatch {option!r} is not a plain sbatch option",
                next="use KEY=VALUE without spaces or quotes: --sbatch partition=gpu --sbatch "
                "time=20:00:00",
            )


def script(job: Job) -> str:
    """The text of the script. Raises UsageError for an option that a line of it can't hold."""
    refuse_odd(job.options)
    given = {option.partition("=")[0] for option in job.options}
    lines = [f"#SBATCH --{text}" for text in _defaults(job) if text.partition("=")[0] not in given]
    lines += [f"#SBATCH --{option}" for option in job.options]
    node = shlex.join(["bash", "-c", _NODE, "node"])
    start = _continued(shlex.join(job.surgeon), _SRUN, node, shlex.join(job.trainer))
    parts = ["#!/bin/bash", *lines, "", _HEAD.format(folder=shlex.quote(str(job.folder)))]
    ready = [_READY.format(ready=shlex.join(job.ready))] if job.ready else []
    if job.kill_switch is None and not job.watch:
        return "\n".join([*parts, *ready, start, ""])
    before, ends = "preempted=\n", [_WAIT]
    if job.kill_switch is not None:
        before = _STOP.format(stop=shlex.quote(str(job.kill_switch)))
        ends += [_REQUEUE]
    if job.hung is not None:
        before += _HUNG.format(hung=shlex.quote(str(job.hung)), requeues=job.requeues)
        ends += [_HUNG_END]
    if not job.watch:
        return "\n".join([*parts, *ready, before, f"{start} &\n{_TRAINER}", *ends, _END])
    watch = shlex.join(job.watch)
    beside = _WATCH.format(watch=watch)
    body = "\n".join([*ready, f"{start} &\n{_TRAINER}", beside, *ends, _AFTER.format(watch=watch)])
    return "\n".join([*parts, before, _AGAIN, textwrap.indent(body, "  "), "done", _END])


def _defaults(job: Job) -> list[str]:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.name).strip("-") or "train"
    texts = [f"job-name={name}", f"nodes={job.nodes}", "ntasks-per-node=1", "open-mode=append"]
    return texts if job.kill_switch is None else [*texts, "requeue", "signal=B:USR1@120"]


def _continued(*commands: str) -> str:
    """One command over several lines, each program that starts the next on its own."""
    return " \\\n  ".join(commands)


_SRUN = (
    'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 '
    "--kill-on-bad-exit=1"
)
_NODE = 'PET_NODE_RANK="$SLURM_NODEID" exec "$@"'
"""On each node: torchrun reads an option that is not given from PET_<OPTION>."""

_HEAD = """\
set -euo pipefail
cd -- {folder}

# Rank 0 runs on the first node of the job; torchrun finds it by these.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PET_NNODES="$SLURM_JOB_NUM_NODES"
export PET_MASTER_ADDR="${{nodes%%$'\\n'*}}"
export PET_MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
"""

_READY = """\
# A torn save is not loaded: the newest sound step before it is. Without one the job ends with 4.
{ready} >&2
"""

_STOP = """\
# The trainer saves and exits with 0 when this file is there. SLURM's signal puts it there, with the
# number of this job; `relaunch` removes that of a job that is gone. One that a person has put there
# stays, and no job trains on.
stop={stop}
if [[ -f "$stop" && "$(< "$stop")" == "job $SLURM_JOB_ID" ]]; then rm -f -- "$stop"; fi
preempted=
trap 'preempted=yes; echo "job $SLURM_JOB_ID" > "$stop"' USR1
"""

_TRAINER = "trainer=$!"

_WAIT = """\
status=0
wait "$trainer" || status=$?
while kill -0 "$trainer" 2> /dev/null; do  # the signal ends `wait`, not the trainer
  status=0
  wait "$trainer" || status=$?
done"""

_REQUEUE = """\
if [[ -n "$preempted" && "$status" -eq 0 ]]; then
  rm -f -- "$stop"
  scontrol requeue "$SLURM_JOB_ID"
  exit "$status"
fi"""

_AGAIN = """\
# Once, and once more after each trouble that the watch has treated.
while :; do"""

_WATCH = """\
{watch} --job --pid "$trainer" >&2 &
watcher=$!"""

_AFTER = """\
wait "$watcher" || true  # it ends with the trainer
if [[ -n "$preempted" ]] || ! {watch} --after "$status" >&2; then break; fi"""

_HUNG = """
# The trainer's watchdog leaves this file when it makes no progress. How often it has done so in
# this job is counted beside it.
hung={hung}
requeues={requeues}
rm -f -- "$hung"
"""

_HUNG_END = """\
if [[ "$status" -ne 0 && -f "$hung" ]]; then
  rm -f -- "$hung"
  times=$(($(cat -- "$hung-$SLURM_JOB_ID" 2> /dev/null || echo 0) + 1))
  if [[ "$times" -le "$requeues" ]]; then
    echo "$times" > "$hung-$SLURM_JOB_ID"
    echo "the trainer hung; requeue $times of $requeues" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit "$status"
  fi
  echo "the trainer hung once more after $requeues requeues; the job ends" >&2
fi
if [[ -z "$preempted" ]]; then rm -f -- "$hung-$SLURM_JOB_ID"; fi"""

_END = """\
exit "$status"
"""
