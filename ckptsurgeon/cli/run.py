"""relaunch: start the trainer from the state on disk and hold it to the promise."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.options import Cancelled, Common
from ckptsurgeon.edits import Promise

if TYPE_CHECKING:
    from ckptsurgeon.recipe import Relaunch
    from ckptsurgeon.run import Run


def relaunch(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="More arguments for the trainer."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Stop the trainer once its first line was compared.")
    ] = False,
    *,
    common: Common,
) -> None:
    """Start the trainer and check its first line.

    The line must say what the checkpoint promises; else the trainer is stopped, and the exit code
    is 4."""
    from ckptsurgeon import surgery

    run = common.open_run()
    start(run, surgery.inspect(run).promise, None, arguments or (), common, check=check)


def start(
    run: Run,
    promise: Promise,
    wanted: Relaunch | None,
    extra: Sequence[str],
    common: Common,
    *,
    check: bool = False,
) -> None:
    """Run the trainer and exit with its status.

    Its output is the answer; with --json it goes to stderr, and the answer is one document."""
    from ckptsurgeon import relaunch as launching

    argv = launching.command(run, wanted, extra)
    out = sys.stderr if common.as_json else sys.stdout
    if common.dry_run:
        common.answer(lambda: shlex.join(argv), lambda: report.relaunch_json(argv, promise, None))
        return
    try:
        status = launching.relaunch(run, promise, argv, check=check, out=out)
    except KeyboardInterrupt:
        raise Cancelled(
            "the trainer was stopped by Ctrl-C",
            untouched="every checkpoint that it saved is kept",
            next="ckptsurgeon relaunch    goes on from the newest one",
        ) from None
    if common.as_json:
        common.answer(str, lambda: report.relaunch_json(argv, promise, status))
    raise typer.Exit(status)
