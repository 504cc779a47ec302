"""docs/optimizers.md: what `reset moments` does for each optimizer, as the tests find it.

`python -m tests.support.optimizer_page` writes it anew; it needs the extra `formats`.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path

from ckptsurgeon.formats.optimizers import trainers
from tests.support.launch import REPO
from tests.support.optimizer_law import Outcome, Small, outcome

DOCUMENT = REPO / "docs" / "optimizers.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEAD = ["| optimizer | what it keeps of a parameter | reset moments |", "|---|---|---|"]


def line(name: str, found: Outcome) -> str:
    """One row."""
    how = re.sub(r"^refused: \S+: ", "refused: ", found.how)
    return f"| {name} | {' '.join(f'`{key}`' for key in found.state)} | {how} |"


def lines(text: str) -> list[str]:
    """The rows of the page."""
    return text.splitlines()


def measured(folder: Path) -> list[str]:
    """Every row, found by a run of each class."""
    from tests.support.optimizer_classes import CASES, TORCH, process_group, torch_optimizer

    rows = [
        line(
            f"torch.{case}",
            outcome(folder / case, Small, lambda model, c=case: torch_optimizer(c, model)),
        )
        for case in TORCH
    ]
    for name, case in CASES.items():
        inside = folder / name
        inside.mkdir()
        with process_group(inside):
            rows.append(line(name, outcome(inside / "run", case.kind, case.make)))
    return rows


def table(rows: list[str]) -> str:
    """The part of the page that is generated."""
    from tests.support.optimizer_classes import UNMADE

    apart = [f"| {name} | | not run: {why} |" for name, why in sorted(UNMADE.items())]
    read = ["| optimizer | source | what it keeps of a parameter |", "|---|---|---|"] + [
        f"| {item.name} | {item.source} | {' '.join(f'`{key}`' for key in item.state)} |"
        for item in trainers.ENTRIES
    ]
    return "\n".join(
        [BEGIN, "", *HEAD, *rows, *apart, "", "Read in the source and not run here:", "", *read, "",
         END]
    )  # fmt: skip


def main() -> None:
    """Write the page anew."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    text = DOCUMENT.read_text("utf-8")
    start, end = text.index(BEGIN), text.index(END) + len(END)
    DOCUMENT.write_text(text[:start] + table(rows) + text[end:], "utf-8")


if __name__ == "__main__":
    main()
