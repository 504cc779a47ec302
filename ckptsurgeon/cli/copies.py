"""fork, export: what is written outside the run, which they only read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.options import AllowGlobal, Common, saved_steps
from ckptsurgeon.errors import UsageError


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
        bool, typer.Option("--hard-link", help="Share files, where blocks can't be shared.")
    ] = False,
    copy: Annotated[bool, typer.Option("--copy", help="Share nothing.")] = False,
    allow_global: AllowGlobal = None,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The reason, kept in the receipt.")
    ] = None,
    *,
    common: Common,
) -> None:
    """A branch of the run in a directory of its own.

    It holds one step, shares its bytes, and has its own counters, pointers and receipts. Nothing of
    this run changes."""
    from ckptsurgeon.recipe.file import from_data
    from ckptsurgeon.surgery import fork as forking

    if hard_link and copy:
        raise UsageError("both --hard-link and --copy were given", next="one of them")
    run = common.open_run()
    run.refuse_interrupted()
    at = run.latest() if step is None else step
    recipe = from_data({"why": why} if why else {}, [f"set.{item}" for item in settings or ()])
    if not settings:
        recipe = from_data({})
    how = "hard-link" if hard_link else "copy" if copy else "reflink"
    if common.dry_run:
        forking.refuse_taken(folder)
        run.checkpoint(at)
        files = run.format.files(run.root, at)
        total = sum(path.stat().st_size for path in files)
        done = forking.Fork(folder, at, len(files), total, None)
    else:
        done = forking.fork(run, at, folder, recipe, how, allow_globals=allow_global or ())
    common.report(
        lambda: report.fork(done, how, written=not common.dry_run),
        lambda: report.fork_json(done, how, written=not common.dry_run),
    )


def export(
    step: Annotated[
        int, typer.Argument(metavar="STEP", help="A saved step.", autocompletion=saved_steps)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A new directory.")],
    shard_size: Annotated[
        float, typer.Option("--shard-size", metavar="GB", min=0.000001, help="Of one file.")
    ] = 5.0,
    *,
    common: Common,
) -> None:
    """Write the weights of one step as safetensors.

    Files with an index, in a new directory. Weights of all ranks are consolidated: as they were
    saved, or the fp32 masters of ZeRO 3. No tensor is held in memory."""
    from ckptsurgeon.surgery import export as exporting
    from ckptsurgeon.surgery.fork import refuse_taken

    run = common.open_run()
    run.refuse_interrupted()
    if common.dry_run:
        refuse_taken(output)
        tensors, size = exporting.preview(run, step)
        files: tuple[str, ...] = ()
    else:
        with report.Progress(sys.stderr, quiet=common.quiet or common.as_json) as progress:
            done = exporting.export(
                run, step, output, shard_bytes=int(shard_size * 1e9), progress=progress
            )
        tensors, size, files = done.tensors, done.size, done.files
    common.report(
        lambda: report.export(output, tensors, size, files),
        lambda: report.export_json(output, tensors, size, files),
    )
