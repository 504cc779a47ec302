"""check-optimizer: describes an optimizer by running it where it is installed, and proves it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptsurgeon import report
from ckptsurgeon.cli import new_file
from ckptsurgeon.cli.options import Common
from ckptsurgeon.errors import UsageError, VerificationFailed
from ckptsurgeon.files.plain_yaml import scalar


def check_optimizer(
    optimizer_class: Annotated[
        str, typer.Argument(metavar="MODULE.CLASS", help="For example timm.optim.AdamP.")
    ],
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="NAME=VALUE", help="An argument of its constructor; repeatable."
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PATH", help="The Python where it is installed [this]."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save the page for --optimizer."),
    ] = None,
    *,
    common: Common,
) -> None:
    """Describe an optimizer by running it, and prove the description.

    It runs the class on a tiny model, reads what it saves, and tries reset, set and graft: the next
    update must be that of a new optimizer, of one with the new rate, of the grafted one. torch and
    the class must be installed, if not here then for --python. No run is read.

    Examples:
    ckptsurgeon check-optimizer torch.optim.NAdam --dry-run
    ckptsurgeon check-optimizer torch.optim.RMSprop --arg centered=true -o optimizer.yaml
    """
    from ckptsurgeon.surgery.check_optimizer import check_optimizer, page_text

    module, _, name = optimizer_class.rpartition(".")
    if not module or not name:
        raise UsageError(f"{optimizer_class!r} is not MODULE.CLASS", next="timm.optim.AdamP")
    if output is not None and not common.dry_run:
        new_file.refuse_existing(output)
    arguments = dict(_pair(text) for text in argument or ())
    checked = check_optimizer(optimizer_class, arguments, python or sys.executable)
    page = page_text([checked])
    if output is not None and checked.right and not common.dry_run:
        new_file.write(output, page.encode())
    common.report(
        lambda: report.optimizer_check(checked, page, common.style),
        lambda: report.optimizer_check_json(checked),
    )
    if not checked.right:
        wrong = next(trial for trial in checked.trials if trial.wrong)
        raise VerificationFailed(
            f"{optimizer_class}: {wrong.operation}: {wrong.wrong}",
            untouched="no page was written",
            next="start the trainer without its saved optimizer state",
        )


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"{text!r} is not NAME=VALUE", next="--arg momentum=0.9")
    return name, scalar(value)
