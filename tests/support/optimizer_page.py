"""docs/optimizers.md: what `reset moments` does for each optimizer, as the tests find it.

`python -m tests.support.optimizer_page` writes it anew; it needs the extra `formats`.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from pathlib import Path

from ckptsurgeon.formats.optimizers import pages, trainers
from ckptsurgeon.formats.optimizers.entry import Entry
from ckptsurgeon.formats.optimizers.roles import WORDS
from tests.support.launch import REPO
from tests.support.optimizer_law import Outcome, Small, outcome
from tests.support.optimizer_packages import NOT_RUN, PACKAGES

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


def libraries() -> str:
    """How many classes of each library that has pages are reset, refused by name, and not run.
    tests/formats/optimizers/test_packages.py runs each of them again."""
    found: dict[str, list[Entry]] = {}
    for entry in pages.shipped():
        found.setdefault(entry.source, []).append(entry)
    head = "| library | `reset moments` right | refused by name | wrong | not run |"
    rows = [head, "|---|---|---|---|---|"]
    count = [0, 0, 0]
    for source, entries in sorted(found.items()):
        package = source.partition(" ")[0]
        why: dict[str, list[str]] = {}
        for entry in entries:
            if entry.refused:
                why.setdefault(entry.refused, []).append(entry.name)
        refused = sum(map(len, why.values()))
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in why.items())
        apart = [
            f"{name.rpartition('.')[2]} ({reason})"
            for name, reason in sorted(NOT_RUN.items())
            if PACKAGES[name.rpartition(".")[0]] == package
        ]
        numbers = len(entries) - refused, refused, len(apart)
        count = [a + b for a, b in zip(count, numbers, strict=True)]
        said = f"{refused} ({reasons})" if refused else "0"
        rows.append(f"| {source} | {numbers[0]} | {said} | 0 | {', '.join(apart)} |")
    right, refused, apart_from = count
    return "\n".join([*rows, f"| together | {right} | {refused} | 0 | {apart_from} |"])


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
    text = written(text, libraries(), "libraries")
    DOCUMENT.write_text(written(text, table(rows), "table"), "utf-8")


if __name__ == "__main__":
    main()
