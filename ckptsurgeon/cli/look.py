"""status, show, log, verify: what is there; these commands write nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.options import Common, saved_steps
from ckptsurgeon.errors import SurgeryError, VerificationFailed


def status(*, common: Common) -> None:
    """The run: steps, pointers, values, events, surgery."""
    run = common.open_run()
    state, problem = None, None
    try:
        state = run.checkpoint(run.latest()).state()
    except SurgeryError as error:
        problem = error
    common.answer(
        lambda: report.status(run, state, problem, common.look),
        lambda: report.status_json(run, state, problem),
    )


def show(
    step: Annotated[
        int,
        typer.Argument(metavar="STEP", help="A saved step.", autocompletion=saved_steps),
    ],
    *,
    common: Common,
) -> None:
    """One checkpoint: each field and all its places.

    The place that wins on load stands first; a copy is what the trainer overwrites or ignores."""
    run = common.open_run()
    found = run.checkpoint(step)
    common.answer(
        lambda: report.checkpoint(run, found, common.look),
        lambda: report.checkpoint_json(run, found),
    )


def log(*, common: Common) -> None:
    """The surgeries of this run, newest first."""
    receipts = common.open_run().receipts()
    common.answer(lambda: report.log(receipts, common.look), lambda: report.log_json(receipts))


def verify(
    step: Annotated[
        int | None,
        typer.Argument(
            metavar="STEP", help="A saved step [what latest names].", autocompletion=saved_steps
        ),
    ] = None,
    *,
    common: Common,
) -> None:
    """Read one step and say what is wrong with it.

    Shards complete, readable and in agreement, pointers right, the last promise kept."""
    from ckptsurgeon import surgery

    found = surgery.verify(common.open_run(), step)
    common.answer(
        lambda: report.verification(found, common.look),
        lambda: report.verification_json(found),
    )
    if found.findings:
        raise typer.Exit(VerificationFailed.exit_code)
