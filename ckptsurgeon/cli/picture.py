"""report: one picture of the run, as SVG, PNG or a page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptsurgeon.cli.advise import RunOrLogs, write
from ckptsurgeon.cli.options import Common
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import DRY_RUN, again, command
from ckptsurgeon.report import SCHEMA
from ckptsurgeon.report.style import size, with_apply


def picture(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="FILE.svg, FILE.png or FILE.html."),
    ],
    x: Annotated[
        str, typer.Option("--x", metavar="AXIS", help="steps, tokens, samples or time.")
    ] = "steps",
    dark: Annotated[bool, typer.Option("--dark", help="On dark ground; HTML has both.")] = False,
    *,
    logs: RunOrLogs,
    common: Common,
) -> None:
    """Draw the run: what was kept, what was left, and why.

    The thick line leads to the newest step. A faded one was left at its cross, and the arrow from
    there names the surgery and its reason. Needs matplotlib: pip install 'ckptsurgeon[plot]'.

    Examples:
    ckptsurgeon report -o run.svg
    ckptsurgeon report -o run.html --x tokens
    """
    from ckptsurgeon.look.story import tell
    from ckptsurgeon.report.picture import FORMATS, draw, page
    from ckptsurgeon.report.picture.theme import DARK, LIGHT

    format = output.suffix.lower().lstrip(".")
    if format not in FORMATS:
        raise UsageError(
            f"{output}: a picture is {', '.join(FORMATS)}, by the end of its name",
            next=command("report", "-o", "run.svg"),
        )
    run = logs.run(common)
    story = tell(logs.read(run), run, logs.rule)
    made = page(story, x) if format == "html" else draw(story, format, x, DARK if dark else LIGHT)
    if not common.dry_run:
        write(output, made)
    common.report(
        lambda: (
            with_apply(f"would write {output}: {size(len(made))}", again(without=DRY_RUN))
            if common.dry_run
            else f"wrote {output}: {size(len(made))}"
        ),
        lambda: {"schema": SCHEMA, "file": str(output), "bytes": len(made), "x": x},
    )
