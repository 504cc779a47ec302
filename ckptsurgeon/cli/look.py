"""status, show, log, verify, doctor: what is there; these commands write nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.options import Common
from ckptsurgeon.errors import SurgeryError, VerificationFailed
from ckptsurgeon.operations.completion import saved_steps


def status(*, common: Common) -> None:
    """Show the run: steps, pointers, values, events, last surgery.

    Examples:
    ckptsurgeon status
    ckptsurgeon status --json
    """
    run = common.open_run()
    state, problem = None, None
    try:
        state = None if run.bare else run.state(run.latest())
    except SurgeryError as error:
        problem = error
        problem.next = tuple(common.here(hint) for hint in problem.next)
    common.answer(
        lambda: common.here(report.status(run, state, problem, common.style)),
        lambda: report.status_json(run, state, problem),
    )


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
    run = common.open_run()
    receipts, damaged = run.receipts(), run.damaged_receipts()
    common.answer(
        lambda: report.log(receipts, common.style, damaged),
        lambda: report.log_json(receipts, damaged),
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
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, help="Files worked on at once.")
    ] = 8,
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
) -> None:
    """Check one step and say what is wrong with it.

    It checks that the shards are complete, readable and in agreement, that the pointers are right,
    and that the last promise was kept. --level 3 also checks every byte that has a CRC, and
    --level 4 finds NaN, Inf and impossible moments. --log and --tb also check what the trainer did
    at its first updates.

    Examples:
    ckptsurgeon verify
    ckptsurgeon verify 6 --level 4
    ckptsurgeon verify --log slurm-4711.out
    """
    from ckptsurgeon import look
    from ckptsurgeon.look.listen import listen

    run = common.open_run()
    with report.Progress(sys.stderr, quiet=common.quiet or common.as_json or level < 3) as progress:
        result = look.verify(run, step, level=level, jobs=jobs, progress=progress)
    word = None if log is tb is None else listen(run, step, log=log, folder=tb)
    common.answer(
        lambda: common.here(report.verification(result, common.style, word)),
        lambda: report.verification_json(result, word),
    )
    if result.findings or (word is not None and word.differs):
        raise typer.Exit(VerificationFailed.exit_code)


def doctor(*, common: Common) -> None:
    """Say what is wrong with the run, and what to do.

    It reports all that verify finds at the latest step, and what makes a run diverge although every
    file is sound: a lost Adam step, newer checkpoints of an abandoned branch, a stale pointer.

    Examples:
    ckptsurgeon doctor
    """
    from ckptsurgeon.look.doctor import diagnose

    run = common.open_run()
    diagnoses = [replace(item, next=common.here(item.next)) for item in diagnose(run)]
    common.answer(
        lambda: report.diagnoses(run, diagnoses, common.style),
        lambda: report.diagnoses_json(run, diagnoses),
    )
    if diagnoses:
        raise typer.Exit(VerificationFailed.exit_code)
