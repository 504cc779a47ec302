"""export: what is written outside the run, which it only reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.options import Common, saved_steps


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
    from ckptsurgeon import export as exporting

    run = common.open_run()
    if common.dry_run:
        tensors, size = exporting.preview(run, step)
        files: tuple[str, ...] = ()
    else:
        with report.Progress(sys.stderr, quiet=common.quiet or common.as_json) as progress:
            done = exporting.export(
                run, step, output, shard_bytes=int(shard_size * 1e9), progress=progress
            )
        tensors, size, files = done.tensors, done.size, done.files
    common.answer(
        lambda: report.export(output, tensors, size, files),
        lambda: report.export_json(output, tensors, size, files),
    )
