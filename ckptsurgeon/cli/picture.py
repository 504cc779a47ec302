"""report: one picture of the run, as SVG, PNG or a page of HTML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ckptsurgeon.cli import new_file
from ckptsurgeon.cli.advise import RunOrLogs, plan_of
from ckptsurgeon.cli.options import Common
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import DRY_RUN, again, command
from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.style import size, with_apply


def _axes() -> list[str]:
    from ckptsurgeon.report.picture.axes import KINDS

    return [*KINDS]


def picture(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="FILE.svg, FILE.png or FILE.html."),
    ],
    x: Annotated[
        str,
        typer.Option(
            "--x",
            metavar="AXIS",
            help="steps, tokens, samples or time.",
            autocompletion=_axes,
        ),
    ] = "steps",
    dark: Annotated[bool, typer.Option("--dark", help="Dark theme; HTML has both.")] = False,
    *,
    logs: RunOrLogs,
    common: Common,
) -> None:
    """Plot the run's history: what was kept, what was abandoned, and why.

    The thick line leads to the newest step. A faded one was abandoned at its cross, and the arrow
    from there names the surgery and its reason. HTML also has the recipes of advise. It needs
    matplotlib: pip install 'ckptsurgeon[plot]'.

    Examples:
    ckptsurgeon report -o run.svg
    ckptsurgeon report -o run.html --x tokens
    """
    from ckptsurgeon.guard.proposal import first as first_of
    from ckptsurgeon.guard.proposal import proposal
    from ckptsurgeon.look.advise import advise
    from ckptsurgeon.look.timeline import timeline_of
    from ckptsurgeon.report.picture import FORMATS, draw, page
    from ckptsurgeon.report.picture.theme import DARK, LIGHT

    format = output.suffix.lower().lstrip(".")
    if format not in FORMATS:
        raise UsageError(
            f"{output}: the name of a picture ends in .{', .'.join(FORMATS)}",
            next=command("report", "-o", "run.svg"),
        )
    run = logs.run(common)
    read = logs.read(run)
    timeline = timeline_of(read, run, logs.rule)
    if format == "html":
        if run is not None:  # with its steps read as closely as advise reads them
            timeline = replace(timeline, advice=advise(read, run, rule=logs.rule))
        proposals = (
            [] if run is None else [proposal(run, item) for item in timeline.advice.remedies]
        )
        made = page(timeline, x, proposals, first_of(proposals), plan_of("recipe.yaml"))
    else:
        made = draw(timeline, format, x, DARK if dark else LIGHT)
    if not common.dry_run:
        new_file.write(output, made)
    common.report(
        lambda: (
            with_apply(f"would write {output}: {size(len(made))}", again(without=DRY_RUN))
            if common.dry_run
            else f"wrote {output}: {size(len(made))}"
        ),
        lambda: {"schema": SCHEMA, "file": str(output), "bytes": len(made), "x": x},
    )
