"""What a description of a trainer makes of a run, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import count
from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.style import GREEN, RED, Row, Style, clean, names, table

if TYPE_CHECKING:
    from ckptsurgeon.run.run import Run
    from ckptsurgeon.surgery.check_format import Check, Trial


def format_check(run: Run, checked: Check, style: Style) -> str:
    """The steps, the fields, and each trial."""
    steps = names([str(step) for step in checked.steps])
    rows = [Row("steps", steps, f"{count(checked.files, 'file')} in the latest")]
    rows += [
        Row("restart", f"{clean(file)} → {'no step' if step is None else step}")
        for file, step in checked.pointers.items()
    ]
    rows += [
        Row("fields", name.replace("_", " "), count(places, "place") if places else "nowhere")
        for name, places in checked.fields.items()
    ]
    rows += [Row("paths", clean(path), "leads nowhere here") for path in checked.idle]
    rows += [_row(trial, style) for trial in checked.trials]
    verdict = "every operation was undone, byte for byte" if checked.sound else "not sound"
    head = f"{clean(run.name)}   {clean(checked.format)}"
    painted = style.paint(verdict, GREEN if checked.sound else RED)
    return "\n".join([head, "", *table(rows, style), "", painted])


def _row(trial: Trial, style: Style) -> Row:
    if trial.wrong:
        return Row("trials", trial.operation, style.paint(clean(trial.wrong), RED))
    if trial.refused:
        return Row("trials", trial.operation, f"refused: {clean(trial.refused)}")
    return Row("trials", trial.operation, f"{count(trial.places, 'change')}, done and undone")


def format_check_json(run: Run, checked: Check) -> dict[str, Any]:
    """The document of `check-format`."""
    return {"schema": SCHEMA, "run": str(run.root), "sound": checked.sound, **asdict(checked)}
