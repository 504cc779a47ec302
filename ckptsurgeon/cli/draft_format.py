"""draft-format: a page for a trainer that is not known, by what lies in its run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptsurgeon import disk, report
from ckptsurgeon.cli import new_file
from ckptsurgeon.cli.options import Common
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import command


def draft_format(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save the page for --format."),
    ] = None,
    *,
    common: Common,
) -> None:
    """Draft a description of a trainer that is not known.

    It looks at the names below the folder and into the newest file of each kind, and writes the
    page of docs/described.md: which files are a step, where optimizers, schedulers and counters
    are. Read it, then try it with check-format. It recognizes things by their form: whether the
    trainer takes a value from there, only its loader can say.

    Examples:
    ckptsurgeon draft-format
    ckptsurgeon draft-format -o mytrainer.yaml
    """
    from ckptsurgeon.formats.described.draft import draft

    folder = common.run_dir or Path()
    if not disk.is_folder(folder):
        raise UsageError(f"{folder} is not a directory", next="-C RUN    names the run's folder")
    if output is not None and not common.dry_run:
        new_file.refuse_existing(output)
    drafted = draft(folder)
    page = report.draft_page(drafted)
    if output is not None and not common.dry_run:
        new_file.write(output, page.encode())
    check = command("check-format", output or "FILE", why="tries the page on a copy")
    common.report(lambda: report.draft(drafted, check), lambda: report.draft_json(folder, drafted))
