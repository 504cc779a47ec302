"""A call of the Python API lists the folder of a run a few times, however many steps are in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import Hyperparameters, Recipe, Run, apply, inspect, plan, plan_undo, verify
from tests.hostile.watched import audited
from tests.support.tiny_run import make_run

LISTED = ("os.listdir", "os.scandir")


def listings(root: Path) -> dict[str, int]:
    """How often each call lists the root of the run."""
    count = 0

    def note(event: str, details: tuple[object, ...]) -> None:
        nonlocal count
        count += event in LISTED and str(details[0]) == str(root)

    found = {}
    run = Run.open(root)
    with audited(note):
        planned = plan(run, Recipe(Hyperparameters(lr=3e-4)))
        found["plan"], count = count, 0
        apply(run, planned)
        found["apply"], count = count, 0
        verify(run)
        found["verify"], count = count, 0
        inspect(run)
        found["inspect"], count = count, 0
        plan_undo(run)
        found["plan_undo"] = count
    return found


@pytest.mark.parametrize("steps", [(2, 4), tuple(range(2, 42, 2))])
def test_a_call_lists_the_run_a_few_times(tmp_path: Path, steps: tuple[int, ...]) -> None:
    found = listings(make_run(tmp_path / "run", steps))
    assert all(0 < times <= 15 for times in found.values()), found
