"""What was measured: one row for one figure, with the target that it must reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`measured` in `unit`; `target` is the least that it may be when `at_least`, else the most.
    A row without a target is there to be read."""

    what: str
    measured: float
    unit: str
    target: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def ratio(what: str, measured: float, target: float | None = None, note: str = "") -> Row:
    """How many times less we take."""
    return Row(what, measured, "×", target, at_least=True, note=note)


def table(rows: Sequence[Row]) -> str:
    """The rows as they are quoted."""
    wide = max((len(row.what) for row in rows), default=0) + 2
    lines = [f"{'':<{wide}}{'measured':>11}   must reach"]
    for row in rows:
        target = ""
        if row.target is not None:
            target = f"{'≥' if row.at_least else '≤'} {_number(row.target)} {row.unit}"
        missed = "" if row.met else "   MISSED"
        measured = f"{_number(row.measured)} {row.unit}"
        lines.append(f"{row.what:<{wide}}{measured:>11}   {target:<12}{row.note}{missed}".rstrip())
    return "\n".join(lines)


def page(command: str, machine: str, rows: Sequence[Row], failed: Sequence[str] = ()) -> str:
    """docs/figures.md: the rows as Markdown, with what measured them, and the subjects that did
    not end."""
    lines = [
        "# Figures\n",
        "`make bench` measures all in one run, exits non-zero where a target is missed, and",
        "writes this page. A ratio says how many times less the surgeon takes. The targets in",
        "seconds were set on a machine on which `python -c pass` takes 24 ms.\n",
        f"- command: `{command}`",
        f"- machine: {machine}",
        *(f"- not measured, as it failed: {name}" for name in failed),
        "",
        "| what | measured | must reach | |",
        "|---|---|---|---|",
    ]
    for row in rows:
        target = ""
        if row.target is not None:
            target = f"{'≥' if row.at_least else '≤'} {_number(row.target)} {row.unit}"
        note = row.note.strip() + ("" if row.met else " MISSED")
        measured = f"{_number(row.measured)} {row.unit}"
        lines.append(f"| {row.what} | {measured} | {target} | {note.strip()} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"
