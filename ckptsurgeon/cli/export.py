"""export: the weights of one step in a new directory; the run is only read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.on import Cluster
from ckptsurgeon.cli.options import Common
from ckptsurgeon.hints import DRY_RUN, again
from ckptsurgeon.operations.completion import saved_steps


def export(
    step: Annotated[
        int, typer.Argument(metavar="STEP", help="A saved step.", autocompletion=saved_steps)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A new directory.")],
    shard_size: Annotated[
        float,
        typer.Option(
            "--shard-size", metavar="GB", min=0.000001, help="Largest size of one output file."
        ),
    ] = 5.0,
    *,
    common: Common,
    cluster: Cluster,
) -> None:
    """Write the weights of one step as safetensors.

    It writes files and an index into a new directory. The weights of all ranks are joined: as they
    were saved, or from the fp32 masters of ZeRO 3. No tensor is held in memory. A note
    says where the step has its weights a second time, as an average (EMA) is.

    Examples:
    ckptsurgeon export 8 -o ../weights
    """
    from ckptsurgeon.surgery import export

    run = common.open_run()
    run.refuse_interrupted()
    shard_bytes = int(shard_size * 1e9)
    if (helper := cluster.helper()) is not None:
        if not common.dry_run:
            export.help_with(run, step, output, helper, shard_bytes=shard_bytes)
        return
    if common.dry_run:
        done = export.preview(run, step, output)
    else:
        folders = [run.root, output.absolute().parent]
        quiet = common.quiet or common.as_json
        with (
            report.Progress(sys.stderr, quiet=quiet) as progress,
            cluster.writers(1, folders, progress) as who,
        ):
            done = export.export(
                run, step, output, shard_bytes=shard_bytes, workers=who, progress=progress
            )
    text = report.export(output, done)
    common.report(
        lambda: report.with_apply(text, again(without=DRY_RUN)) if common.dry_run else text,
        lambda: report.export_json(output, done),
    )
