"""check-format: what a description makes of a run, tried on a copy of its latest step."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.options import Common
from ckptsurgeon.errors import VerificationFailed


def check_format(
    format: Annotated[
        str, typer.Argument(metavar="FORMAT", help="FILE.yaml, torch:PATH=KEYS, or a name.")
    ],
    *,
    common: Common,
) -> None:
    """Try a description of a trainer on a copy of its latest step.

    It reads the step and carries out and undoes each operation on a copy beside the run, which
    takes as much space as the step. What the description does not name is refused by name. Whether
    the trainer takes a value from there, only its own loader can say.

    Examples:
    ckptsurgeon check-format torch:global_step{step}/*opt*=optimizer_state_dict.base_optimizer_state
    """
    from ckptsurgeon.surgery.check_format import check_format

    common = replace(common, format_name=format)
    run = common.open_run()
    checked = check_format(run)
    common.answer(
        lambda: report.format_check(run, checked, common.style),
        lambda: report.format_check_json(run, checked),
    )
    if not checked.sound:
        wrong = next(trial for trial in checked.trials if trial.wrong)
        raise VerificationFailed(
            f"{format}: {wrong.operation}: {wrong.wrong}",
            next="leave out of the description what leads there",
        )
