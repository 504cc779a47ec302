"""Every class of pytorch_optimizer, bitsandbytes and torchao: a reset is right, or refused by name.

docs/optimizers.md is written from what is found here: `python -m tests.support.optimizer_page`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.optimizer_classes import CASES, REFUSED, classes, process_group
from tests.support.optimizer_law import outcome
from tests.support.optimizer_page import DOCUMENT, line, lines

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if "4bit" in n else []) for n in CASES]
)  # four bits take a minute
def test_a_reset_makes_the_next_updates_those_of_a_new_optimizer(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    with process_group(tmp_path):
        found = outcome(tmp_path / "run", case.kind, case.make)
    assert found.how.startswith("refused") == (name in REFUSED), found.how
    assert line(name, found) in lines(DOCUMENT.read_text("utf-8"))


def test_no_class_is_forgotten() -> None:
    assert classes() - set(CASES) == set()
