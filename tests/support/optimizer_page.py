"""docs/optimizers.md: what `reset moments` does for each optimizer, as the tests find it.

`python -m tests.support.optimizer_page` writes it anew; it needs the extra `formats`.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path

from ckptsurgeon.formats.optimizers import trainers
from ckptsurgeon.formats.optimizers.roles import WORDS
from tests.support.launch import REPO
from tests.support.optimizer_law import Outcome, Small, outcome

DOCUMENT = REPO / "docs" / "optimizers.md"
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
    """The rows of the classes that are run, and of those that can't be."""
    from tests.support.optimizer_classes import UNMADE

    apart = [f"| {name} | | not run: {why} |" for name, why in sorted(UNMADE.items())]
    return "\n".join([*HEAD, *rows, *apart])


def known() -> str:
    """What the table of the surgeon says beyond them: other optimizers, and roles."""
    read = [
        f"| {item.name} | {item.source} | {' '.join(f'`{key}`' for key in item.state)} |"
        for item in trainers.ENTRIES
    ]
    roles = [
        f"| {role} | {' '.join(f'`{key}`' for key in words.split())} |"
        for role, words in WORDS.items()
    ]
    head = ["| optimizer | source | what it keeps of a parameter |", "|---|---|---|"]
    also = ["", "The role of each key, in one optimizer or another:", "", "| role | keys |"]
    return "\n".join([*head, *read, *also, "|---|---|", *roles])


def written(text: str, block: str, name: str) -> str:
    """The page with `block` between the marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, after = text[: text.index(begin)], text[text.index(end) :]
    return f"{before}{begin}\n\n{block}\n\n{after}"


def main() -> None:
    """Write the page anew."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    text = written(DOCUMENT.read_text("utf-8"), known(), "known")
    DOCUMENT.write_text(written(text, table(rows), "table"), "utf-8")


if __name__ == "__main__":
    main()
