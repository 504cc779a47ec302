"""relaunch: start the trainer from the state on disk and hold it to the promise."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli import new_file
from ckptsurgeon.cli.options import Cancelled, Common, Declined
from ckptsurgeon.errors import SurgeryError, UsageError, VerificationFailed
from ckptsurgeon.hints import again, command
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.report.style import clean
from ckptsurgeon.report.terminal import unchecked

if TYPE_CHECKING:
    from ckptsurgeon.launch.slurm import Job
    from ckptsurgeon.look.resumed.resume import Stamps
    from ckptsurgeon.look.resumed.verdict import Verdict
    from ckptsurgeon.operations.relaunch import Relaunch
    from ckptsurgeon.run.run import Run

REQUEUES = 3
"""How often a job starts again whose trainer hung, where --requeues does not say it."""


def relaunch(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="More arguments for the trainer."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Stop the trainer after its first line.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--exec", help="Take ARGS as the whole command of the trainer.")
    ] = False,
    print_flags: Annotated[
        bool,
        typer.Option("--print-flags", help="Start nothing; print the flags for your launcher."),
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Start nothing; print an sbatch script.")
    ] = False,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="With --slurm: the number of nodes.")
    ] = 1,
    ranks: Annotated[
        int | None,
        typer.Option("--nproc-per-node", metavar="P", min=1, help="Ranks on each node."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="KEY=VALUE", help="With --slurm: a line for sbatch."),
    ] = None,
    requeues: Annotated[
        int | None,
        typer.Option(
            "--requeues",
            metavar="K",
            min=0,
            help="With --slurm: how often a job starts again whose trainer hung (3).",
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--watch", metavar="POLICY", help="With --slurm: watch the trainer (docs/watch.md)."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="With --slurm: write it there."),
    ] = None,
    *,
    common: Common,
) -> None:
    """Start the trainer and check its first line.

    The line must say what the checkpoint promises. If it does not, the trainer is stopped, and the
    exit code is 4. For a trainer of your own, its first usual log lines or logged points are
    compared instead. When the trainer has ended, the first step that it saved is compared with the
    one that it loaded, as verify --after does. With --slurm, a job on one or more nodes does all
    that.

    Examples:
    ckptsurgeon relaunch --check
    ckptsurgeon relaunch -- train_iters=10
    ckptsurgeon relaunch --slurm --sbatch time=20:00:00 -o job.sh
    """
    from ckptsurgeon import look
    from ckptsurgeon.operations.relaunch import Relaunch

    _check(
        slurm, nodes > 1 or options or (requeues, output, policy) != (None,) * 3, whole, arguments
    )
    run = common.open_run()
    run.refuse_interrupted()  # a trainer on half a surgery trains on neither of its sides
    if print_flags:
        from ckptsurgeon.launch.flags import launch_flags

        flags = launch_flags(run)
        common.answer(lambda: shlex.join(flags), lambda: report.flags_json(flags))
        return
    promise = look.inspect(run).promise
    section = None if ranks is None else Relaunch(nproc_per_node=ranks)
    if slurm:
        from ckptsurgeon.guard.policy import load
        from ckptsurgeon.launch.relaunch import job

        often = REQUEUES if requeues is None else requeues
        if policy is not None:
            load(policy)
        wanted = job(run, section, arguments or (), nodes, options or (), often, policy)
        _script(wanted, promise, output, run, common)
    else:
        argv = arguments if whole else None
        start(run, promise, section, arguments or (), common, check=check, argv=argv)


def _check(slurm: bool, of_slurm: object, whole: bool, arguments: Sequence[str] | None) -> None:
    if not slurm and of_slurm:
        raise UsageError(
            "--nodes, --sbatch, --requeues, --watch and -o belong to --slurm",
            next=again("--slurm"),
        )
    if whole and (slurm or not arguments):
        raise UsageError(
            "--exec takes a command and excludes --slurm",
            next=command("relaunch", "--exec", "--", "COMMAND", "ARGS"),
        )


def _script(job: Job, promise: Promise, output: Path | None, run: Run, common: Common) -> None:
    from ckptsurgeon.launch import slurm

    text = slurm.script(job)
    if output is not None and not common.dry_run:
        new_file.write(output, os.fsencode(text))
    to_file = output is not None and not common.dry_run
    if to_file and not common.quiet:
        _show(job.trainer, run)
    tell = partial(common.report, wrote=output) if to_file else common.answer
    tell(
        lambda: (
            f"wrote {output}\n  submit   sbatch {shlex.quote(str(output))}"
            if to_file
            else text.rstrip("\n")
        ),
        lambda: report.relaunch_json(job.trainer, promise, None, text),
    )


def refuse_launch(run: Run, common: Common) -> None:
    """Raise when it is known before a surgery that no trainer can be started after it, or when its
    command is another user's and nobody says that it may be."""
    from ckptsurgeon.launch.relaunch import refuse_unknown_launch

    if run.bare:
        raise UsageError(
            f"{run.root} is a log directory without checkpoints: no trainer starts from it",
            next=again(without=["--relaunch"]),
        )
    refuse_unknown_launch(run)
    if not common.dry_run:
        _ask(run, common)


def _ask(run: Run, common: Common) -> None:
    """Ask before a command is started that others may have written. --yes does not answer: it was
    typed before anybody saw the command."""
    from ckptsurgeon.launch import written

    others = written.by_others(written.file(run))
    if not others:
        return
    wanted = clean(written.command(run))
    if common.as_json or not sys.stdin.isatty():
        typed = written.words(run) or ["COMMAND", "ARGS"]
        raise SurgeryError(
            f"{others}, and says what to start: {wanted}; that is started only once somebody says "
            "so, and there is no terminal to ask on",
            next=command("relaunch", "--exec", "--", *typed, why="if you want that to run as you"),
        )
    print(f"{others}, and says what to start as you:\n  {wanted}", file=sys.stderr)
    print("start it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined("relaunch: declined", next=())


def _show(argv: Sequence[str], run: Run) -> None:
    """Say what is started, where that is written, and who else writes there."""
    from ckptsurgeon.launch import written

    file = written.file(run)
    others = written.by_others(file)
    said = f"starts: {shlex.join(argv)}   as {file} says{f'; {others}' if others else ''}"
    print(clean(said), file=sys.stderr)


def start(
    run: Run,
    promise: Promise,
    section: Relaunch | None,
    extra: Sequence[str],
    common: Common,
    *,
    check: bool = False,
    argv: Sequence[str] | None = None,
    asked: bool = False,
) -> None:
    """Run the trainer and exit with its status; unless it was `asked` before, ask first where its
    command may be of others.

    Its output is the answer; with --json it goes to stderr, and the answer is one document."""
    from ckptsurgeon.launch import kill_switch, relaunch, wandb_fork
    from ckptsurgeon.logs.printed.comparison import Comparison
    from ckptsurgeon.look.expected import expected
    from ckptsurgeon.look.resumed.resume import later_steps

    if argv is None:
        argv = relaunch.command(run, section, extra)
        if not (asked or common.dry_run):
            _ask(run, common)
        if not (common.quiet or common.dry_run):
            _show(argv, run)
    variables = wandb_fork.variables(run)
    set_first = [f"{name}={value}" for name, value in variables.items()]
    if variables and not (common.quiet or common.dry_run):
        what = "its run of W&B goes on from the step that was rolled back to"
        print(clean(f"sets {shlex.join(set_first)}: {what}"), file=sys.stderr)
    out = unchecked(sys.stderr if common.as_json else sys.stdout)
    if common.dry_run:
        words = ["env", *set_first, *argv] if set_first else argv
        common.answer(
            lambda: shlex.join(words),
            lambda: report.relaunch_json(argv, promise, None, variables=variables),
        )
        return
    comparison = (
        None
        if run.settings.get("relaunch") is None
        else Comparison(expected(run, promise.step - 1))
    )
    if cleared := kill_switch.clear_left(run, argv):
        print(clean(cleared), file=sys.stderr)
    there = later_steps(run, promise.step - 1)
    try:
        status = relaunch.relaunch(
            run, promise, argv, check=check, out=out, comparison=comparison, variables=variables
        )
    except KeyboardInterrupt:
        raise Cancelled(
            "the trainer was stopped by Ctrl-C",
            untouched="every checkpoint that it saved is kept",
            next=command("relaunch", why="continue from the newest one"),
        ) from None
    if check and not common.quiet:
        print(f"verified: the trainer matches the promise of step {promise.step}", file=sys.stderr)
    saved = None if check else _first_save(run, promise.step - 1, there, common)
    if common.as_json:
        spoken = comparison if comparison is not None and comparison.lines else None
        common.report(
            lambda: f"the trainer ended with status {status}",
            lambda: report.relaunch_json(
                argv, promise, status, comparison=spoken, saved=saved, variables=variables
            ),
        )
    if status < 0 and not common.quiet:
        print(_ended_by(-status), file=sys.stderr)
    cold = saved is not None and any(each.differs for each in saved[1])
    status = 128 - status if status < 0 else status  # of a signal, as a shell says it
    raise typer.Exit(status or (VerificationFailed.exit_code if cold else 0))


def _ended_by(number: int) -> str:
    """Which signal ended a trainer that could not say so itself."""
    names = {each.value: each.name for each in signal.Signals}
    by = f"the trainer was ended by {names.get(number, f'signal {number}')}"
    if number == signal.SIGKILL:
        by += ", as the kernel does where memory runs out, and a scheduler at its limit"
    return f"{by}; {command('relaunch')} goes on from the newest complete step"


def _first_save(
    run: Run, step: int, there: Stamps, common: Common
) -> tuple[int, list[Verdict]] | None:
    """Whether the first step that the trainer saved goes on from the one that it loaded."""
    from ckptsurgeon.files.one_look import look_again
    from ckptsurgeon.look.resumed.resume import first_save

    look_again()  # the trainer has saved since
    with report.Progress(sys.stderr, quiet=common.quiet or common.as_json) as progress:
        saved = first_save(run.root, step, there, progress=progress)
    if saved is not None and not common.quiet:
        text = report.first_save(saved[0], step, saved[1], common.style)
        print(text, file=sys.stderr)
    return saved
