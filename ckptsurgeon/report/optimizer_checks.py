"""What an optimizer's page was found to be, and what was tried with it, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import count
from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.style import GREEN, RED, Row, Style, clean, table

if TYPE_CHECKING:
    from ckptsurgeon.surgery.check_optimizer import Checked, Trial


def optimizer_check(checked: Checked, page: str, style: Style) -> str:
    """The page, each trial, and the verdict."""
    rows = [_row(trial, style) for trial in checked.trials]
    tried = count(sum(not trial.refused for trial in checked.trials), "trial")
    verdict = f"{tried}: each led to what it should" if checked.right else "not right"
    painted = style.paint(verdict, GREEN if checked.right else RED)
    return "\n".join([page.rstrip(), "", *table(rows, style), "", painted])


def _row(trial: Trial, style: Style) -> Row:
    arguments = " ".join(f"{key}={value}" for key, value in trial.arguments.items())
    found = "right"
    if trial.wrong:
        found = style.paint(clean(trial.wrong), RED)
    elif trial.refused:
        found = f"refused: {clean(trial.refused)}"
    return Row(trial.operation, clean(arguments) or "as it is built", found)


def optimizer_check_json(checked: Checked) -> dict[str, Any]:
    """The document of `check-optimizer`."""
    return {"schema": SCHEMA, "run": None, "right": checked.right, **asdict(checked)}
