"""status, show, log, verify, doctor: what is there; these commands write nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import disk, report
from ckptsurgeon.cli.on import Cluster
from ckptsurgeon.cli.options import Common, Jobs
from ckptsurgeon.errors import (
    DamagedFile,
    NotUnderstood,
    SurgeryError,
    UsageError,
    VerificationFailed,
)
from ckptsurgeon.hints import Hint, again, command
from ckptsurgeon.operations.completion import saved_steps

if TYPE_CHECKING:
    from ckptsurgeon.look.loss_tail import LossTail
    from ckptsurgeon.report.style import Row
    from ckptsurgeon.run.run import Run


BESIDE = 16
"""Columns of `status` that its labels take."""


def status(*, common: Common) -> None:
    """Show the run: steps, pointers, values, events, last surgery.

    Examples:
    ckptsurgeon status
    ckptsurgeon status --json
    """
    from ckptsurgeon.look.launch_ranks import torn

    run = common.open_run()
    state, problem, found = None, None, []
    try:
        if not run.bare:
            checkpoint = run.checkpoint(run.latest())
            state = run.with_caveats(checkpoint.state())
            found = torn(run, checkpoint)
    except SurgeryError as error:
        problem = error
        if isinstance(error, DamagedFile):
            problem.hints = (command("doctor", why="what is damaged, and the way back"),)
    common.answer(
        lambda: report.status(run, state, problem, common.style, *_loss(run, common), found),
        lambda: report.status_json(run, state, problem, _loss_tail(run), found),
    )


def _loss_tail(run: Run) -> LossTail | None:
    """The end of the loss, without NumPy, which takes longer to load than all of `status`."""
    from ckptsurgeon.look.loss_tail import loss_tail

    try:
        return loss_tail(run)
    except (SurgeryError, OSError):  # a log that can't be read is no reason to show no status
        return None


def _loss(run: Run, common: Common) -> tuple[Sequence[Row], tuple[str, Hint] | None]:
    """The end of the loss, and what is wrong with it."""
    if (seen := _loss_tail(run)) is None:
        return (), None
    from ckptsurgeon.look.loss_tail import STEP
    from ckptsurgeon.report.sparkline import headline, sparkline, unremarkable

    said = headline(seen)
    saved = run.steps() if seen.word == STEP else []
    rows = sparkline(seen, saved, common.style.width - BESIDE)
    return [*rows, *([] if said else [unremarkable(seen)])], said


def show(
    step: Annotated[
        int | None,
        typer.Argument(metavar="STEP", help="A saved step [latest].", autocompletion=saved_steps),
    ] = None,
    *,
    common: Common,
) -> None:
    """Show one checkpoint: each field and all its places.

    The place that wins on load stands first; a copy is what the trainer overwrites or ignores.

    Examples:
    ckptsurgeon show
    ckptsurgeon show 6
    """
    run = common.open_run()
    checkpoint = run.checkpoint(run.latest() if step is None else step)
    common.answer(
        lambda: report.checkpoint(run, checkpoint, common.style),
        lambda: report.checkpoint_json(run, checkpoint),
    )


def log(*, common: Common) -> None:
    """List the surgeries of this run, newest first.

    Examples:
    ckptsurgeon log
    """
    from ckptsurgeon.run.attic import pruned
    from ckptsurgeon.transaction import given_up

    run = common.open_run()
    receipts, damaged, over = run.receipts(), run.damaged_receipts(), given_up.read(run.root)
    known = [*receipts, *(item.receipt for item in over)]
    gone = {item.id for item in known if disk.exists(run.root / pruned(item.id))}
    common.answer(
        lambda: report.log(receipts, common.style, pruned=gone, damaged=damaged, given_up=over),
        lambda: report.log_json(receipts, pruned=gone, damaged=damaged, given_up=over),
    )


def verify(
    step: Annotated[
        int | None,
        typer.Argument(metavar="STEP", help="A saved step [latest].", autocompletion=saved_steps),
    ] = None,
    level: Annotated[
        int,
        typer.Option(
            "--level",
            metavar="0..4",
            min=0,
            max=4,
            help="0 file names, 1 file structure, 2 contents, 3 all CRCs, 4 NaN, Inf, moments.",
        ),
    ] = 2,
    against: Annotated[
        int | None,
        typer.Option(
            "--after",
            "--against",
            metavar="STEP",
            help="Level 4, and whether it goes on from this earlier step: moments, weights, data.",
            autocompletion=saved_steps,
        ),
    ] = None,
    jobs: Jobs = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Compare what the trainer printed after the surgery with the promise.",
        ),
    ] = None,
    tb: Annotated[
        Path | None,
        typer.Option(
            "--tb",
            metavar="DIR",
            help="Compare what it logged (TensorBoard, CSV) with the promise.",
        ),
    ] = None,
    *,
    common: Common,
    cluster: Cluster,
) -> None:
    """Check one step and say what is wrong with it.

    It checks that the shards are complete, readable and in agreement, that the pointers are right,
    and that the last promise was kept. --level 3 also checks every byte that has a CRC. --level 4
    also finds NaN, Inf, moments that no gradients can give, masters that do not round to their
    weights and a lost Adam step. --after says whether the trainer resumed from an earlier step, or
    began with a cold optimizer (docs/vitals.md). --log and --tb also check what the trainer did at
    its first updates.

    Examples:
    ckptsurgeon verify
    ckptsurgeon verify 8 --after 6
    ckptsurgeon verify --log slurm-4711.out
    """
    from ckptsurgeon import look
    from ckptsurgeon.look.listen import listen

    run = common.open_run()
    quiet = common.quiet or common.as_json or (level < 3 and against is None)
    with (
        report.Progress(sys.stderr, quiet=quiet) as progress,
        cluster.workers(jobs, [run.root], progress) as readers,
    ):
        result = look.verify(
            run, step, level=level, against=against, jobs=readers, progress=progress
        )
    remedy: Hint = command("doctor", why="what helps")
    if any(each.differs for each in result.since) and against is not None:
        remedy = command("rollback", "--to", against, why="then relaunch with all of that step")
    elif step is not None:
        older = [other for other in run.steps() if other < step]
        remedy = command("verify", older[-1], why="the step before it") if older else ""
    comparison = None if log is tb is None else listen(run, step, log=log, folder=tb)
    common.answer(
        lambda: report.verification(result, common.style, comparison, remedy=remedy),
        lambda: report.verification_json(result, comparison),
    )
    if result.findings or (comparison is not None and comparison.differs):
        raise typer.Exit(VerificationFailed.exit_code)


def doctor(
    vitals: Annotated[
        bool,
        typer.Option("--vitals", help="Also say what is unusual in its tensors, worst first."),
    ] = False,
    against: Annotated[
        int | None,
        typer.Option(
            "--against",
            metavar="STEP",
            help="With --vitals: also the growth of each norm since an earlier step.",
            autocompletion=saved_steps,
        ),
    ] = None,
    jobs: Jobs = None,
    *,
    common: Common,
    cluster: Cluster,
) -> None:
    """Say what is wrong with the run, and what to do.

    It reports all that verify finds at the latest step, and what makes a run diverge although every
    file is sound: a lost Adam step, a next rate of 0, newer checkpoints of an abandoned branch, a
    stale pointer, logs that end before the newest checkpoint. --vitals reads every tensor and
    reports what is unusual in it, which no exit code counts (docs/vitals.md).

    Examples:
    ckptsurgeon doctor
    ckptsurgeon doctor --vitals
    ckptsurgeon doctor --vitals --against 6
    """
    from ckptsurgeon.look.doctor import diagnose, judged
    from ckptsurgeon.look.finding import Finding
    from ckptsurgeon.look.vitals.vitals import examine

    option = "--against" if against is not None else cluster.shared
    if option and not vitals:
        raise UsageError(f"{option} belongs to --vitals", next=again("--vitals"))
    run = common.open_run()
    loss = judged(run)
    diagnoses = diagnose(run, loss)
    seen = None
    if vitals:
        check = command("verify", "--level", "4", why="all that is wrong with the step")
        quiet = common.quiet or common.as_json
        with (
            report.Progress(sys.stderr, quiet=quiet) as progress,
            cluster.workers(jobs, [run.root], progress) as readers,
        ):
            try:
                seen = examine(run, against=against, jobs=readers, progress=progress)
                diagnoses += [Finding(fact, check) for fact in seen.facts]
            except UsageError:
                raise
            except NotUnderstood as error:
                print(f"no vital signs: {error.what}", file=sys.stderr)
            except SurgeryError as error:  # mostly one that is among the findings already
                diagnoses.append(Finding(f"the vital signs can't be read: {error.what}", check))
    common.answer(
        lambda: report.diagnoses(run, diagnoses, common.style, loss, seen),
        lambda: report.diagnoses_json(run, diagnoses, loss, seen),
    )
    if diagnoses:
        raise typer.Exit(VerificationFailed.exit_code)
