"""fork: a new run from one step of this one, which is only read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli import bucket
from ckptsurgeon.cli.options import AllowGlobal, Common
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import DRY_RUN, again
from ckptsurgeon.operations.completion import saved_steps


def fork(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new run's directory.")],
    step: Annotated[
        int | None,
        typer.Option(
            "--step", metavar="STEP", help="A saved step [latest].", autocompletion=saved_steps
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As `ckptsurgeon set`; repeatable."),
    ] = None,
    hard_link: Annotated[
        bool, typer.Option("--hard-link", help="Hard-link files instead of reflinking.")
    ] = False,
    copy: Annotated[bool, typer.Option("--copy", help="Share nothing: copy every byte.")] = False,
    logs: Annotated[
        bool, typer.Option("--logs", help="Bring its logs up to the step: docs/logs.md.")
    ] = False,
    allow_global: AllowGlobal = None,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The reason, kept in the receipt.")
    ] = None,
    *,
    common: Common,
) -> None:
    """Make a new run from one step, in a directory of its own.

    It shares the bytes of the step, and has its own counters, pointers and receipts. Nothing in
    this run changes. For a run in a bucket, DIR is a prefix of the same bucket, s3://BUCKET/PREFIX,
    and the store makes the copies.

    Examples:
    ckptsurgeon fork ../branch --step 6 --copy
    ckptsurgeon fork ../lower-lr --copy --set lr=3e-5 --why "is the lr too high?"
    """
    from ckptsurgeon.operations.logs import Logs
    from ckptsurgeon.recipe.file import from_data
    from ckptsurgeon.surgery import bucket_fork, fork

    if hard_link and copy:
        raise UsageError("both --hard-link and --copy were given", next="give one of them")
    run = common.open_run()
    run.refuse_interrupted()
    branch = bucket.branch(folder, hard_link, logs)
    at = run.latest() if step is None else step
    recipe = from_data({"why": why} if why else {}, [f"set.{item}" for item in settings or ()])
    if logs:
        recipe = recipe.but(replace(recipe[Logs], of=str(run.root)))
    elif not settings:
        recipe = from_data({})
    how = "hard-link" if hard_link else "copy" if copy or branch is not None else "reflink"
    if branch is not None:
        if common.dry_run:
            done = bucket_fork.planned(run, at, branch, recipe)
        else:
            done = bucket_fork.fork(run, at, branch, recipe, allow_globals=allow_global or ())
    elif common.dry_run:
        done = fork.planned(run, at, folder, recipe)
    else:
        done = fork.fork(run, at, folder, recipe, how, allow_globals=allow_global or ())
    text = report.fork(
        done, how, common.style, written=not common.dry_run, launchable=run.launchable
    )
    common.report(
        lambda: report.with_apply(text, again(without=DRY_RUN)) if common.dry_run else text,
        lambda: report.fork_json(done, how, written=not common.dry_run),
    )
