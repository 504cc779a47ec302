"""docs/formats.md says what `plan` answers, and what it says yes to is done and undone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import SurgeryError
from tests.formats.matrix import (
    BEGIN,
    DOCUMENT,
    END,
    FORMATS,
    OPERATIONS,
    outcome,
    outcomes,
    table,
    words_of,
)
from tests.formats.matrix import written as with_table
from tests.support import claims
from tests.support.launch import REPO
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]


IN_MAKE_TEST = (
    "Hugging Face",
    "torchtitan (DCP)",
)
"""A single file, and one tensor in many files; the bundled trainer's are in
tests/test_contract.py, and every format's kinds of edit in test_conformance.py."""


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run", symlinks=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_MAKE_TEST else pytest.mark.slow)
        for name in FORMATS
    ],
)
@pytest.mark.long
def test_each_yes_is_done_verified_and_undone(
    run_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Each operation in turn, on the run as it was."""
    root = copied(run_of(name), tmp_path)
    before, words = snapshot(root), words_of(root)
    done, unsound, not_undone = [], [], []
    for operation in OPERATIONS:
        plan = outcome(root, operation, words)
        if isinstance(plan, SurgeryError) or plan.empty:
            continue
        surgery.apply(Run.open(root), plan)
        done.append(operation)
        if look.verify(Run.open(root), level=4).findings:
            unsound.append(operation)
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        if snapshot(root) != before:
            not_undone.append(operation)
    assert (unsound, not_undone) == ([], [])
    assert len(done) >= 7


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.long
def test_a_column_of_the_table_is_what_plan_answers(
    run_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """`python -m tests.formats.matrix` writes it anew."""
    found = table({name: outcomes(copied(run_of(name), tmp_path))})
    inner = DOCUMENT.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    assert answers(inner)[name] == answers(found)[name]


def answers(text: str) -> dict[str, dict[str, str]]:
    """By format and operation: the cell of the table, with the reason in place of its number."""
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    head, _, *rows = [line for line in text.partition("| | ")[2].splitlines() if "|" in line]
    names = head.rstrip(" |").split(" | ")
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for row in rows:
        operation, *cells = row.strip("| ").split(" | ")
        if operation in OPERATIONS:
            for name, cell in zip(names, cells, strict=True):
                number = re.fullmatch(r"refused \[(\d+)\]", cell)
                found[name][operation] = cell if number is None else reasons[number[1]]
    return found


@pytest.mark.slow
def test_the_table_is_what_plan_answers(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    found = table({name: outcomes(copied(run_of(name), tmp_path / name)) for name in FORMATS})
    text = DOCUMENT.read_text("utf-8")
    assert text == with_table(text, found)


def test_each_witness_names_cells_that_are_yes_in_the_table() -> None:
    """A claim of a cell that is not there, or is refused, is a claim of nothing."""
    lines = DOCUMENT.read_text("utf-8").splitlines()
    header = next(line for line in lines if line.startswith("| | bundled trainer"))
    columns = [cell.strip() for cell in header.split("|")[2:-1]]
    cells = {
        (column, row): cell.strip()
        for row in OPERATIONS
        for line in lines
        if line.startswith(f"| {row} |")
        for column, cell in zip(columns, line.split("|")[2:-1], strict=True)
    }
    found = list(claims.witnesses())
    assert len(found) >= 20 and {each.column for each in found} <= set(columns)
    for each in found:
        assert claims.asks(REPO / each.test.partition("::")[0], each.library), each
        for row in each.rows:
            assert cells[each.column, row].startswith("yes"), each
    loaded = {(w.column, row) for w in found for row in w.rows if w.how == claims.LOADED}
    assert {key for key, cell in cells.items() if cell == "yes L"} == loaded


HOOKS = "from tests.conftest import _claims_hold, pytest_runtest_makereport  # noqa: F401"


@pytest.mark.long
def test_a_claim_that_the_test_does_not_carry_out_is_caught(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = witness(column, row, ..., by): .")
    (tmp_path / "test_it.py").write_text(
        "import numpy\nimport pytest\n\n"
        "@pytest.mark.witness('any', 'set eps', by='numpy')\n"
        "def test_of_nothing():\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(tmp_path)],
        cwd=REPO, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "which the test never applies" in done.stdout, done.stdout
