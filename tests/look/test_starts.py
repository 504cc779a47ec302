"""Runs in which each start of the trainer logs into a folder of its own, as torchtitan, Lightning
and the Hugging Face Trainer do: together they are one training, before a surgery and after it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon import surgery
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.look.doctor import diagnose
from ckptsurgeon.look.logged import own
from ckptsurgeon.look.loss_tail import loss_tail
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.event_logs import write_log
from tests.support.tiny_run import make_run

HOUR = 3600.0


def started(root: Path, number: int, steps: range, begun: float) -> Path:
    """The folder of a start that logged these steps, one in each second."""
    folder = root / "runs" / f"start_{number}"
    log = write_log(folder, [2.0] * len(steps), steps[0], wall=begun - steps[0])
    at = begun + len(steps)
    os.utime(log, (at, at))
    name = f"events.out.tfevents.{int(begun)}.host.1.0"
    log.rename(folder / name)
    return folder


def trained(root: Path) -> tuple[list[int], list[int]]:
    """The steps of the loss that `advise` sees, and those that `status` sees."""
    run = Run.open(root)
    seen = loss_tail(run)
    assert seen is not None
    return own(run, {}).kept[LOSS].steps.tolist(), list(seen.steps)


@pytest.mark.long
@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(3, 30), min_size=2, max_size=3), st.data())
def test_a_surgery_hides_no_start(lengths: list[int], data: st.DataObject) -> None:
    """Its note is of today, in a folder that a trainer wrote long ago."""
    total = sum(lengths)
    back = data.draw(st.integers(1, total - 1))
    begun = time.time() - 10 * HOUR
    with tempfile.TemporaryDirectory() as folder:
        root = make_run(Path(folder) / "run", (back, total))
        first, holder = 1, Path()
        for number, length in enumerate(lengths):
            steps = range(first, first + length)
            here = started(root, number, steps, begun + number * 60)
            if back in steps:
                holder, saved = here, begun + number * 60 + back - first + 1.5
            first += length
        for path in (root / f"checkpoint-{back}").iterdir():
            os.utime(path, (saved, saved))
        assert trained(root) == (list(range(1, total + 1)),) * 2
        run = Run.open(root)
        plan = surgery.plan(run, from_data({"rollback": {"to": back}}))
        assert not [line for line in plan.warnings if "no events" in line or "end at" in line]
        surgery.apply(run, plan)
        assert trained(root) == (list(range(1, back + 1)),) * 2
        assert [path.parent for path in root.rglob("*.ckptsurgeon") if path.is_file()] == [holder]
        started(root, 9, range(back + 1, back + 41), time.time() - 40)
        make_run(root, (back + 40,))
        assert trained(root) == (list(range(1, back + 41)),) * 2
        assert diagnose(Run.open(root)) == []


@pytest.mark.parametrize(
    ("starts", "gap"),
    [
        (((1, 17), (21, 40)), "no events from 18 to 20 after "),
        (((1, 14), (18, 40)), "no events from 15 to 17 in any log folder"),
    ],
)
def test_events_that_no_start_logged_are_missed(
    tmp_path: Path, starts: tuple[tuple[int, int], ...], gap: str
) -> None:
    root = make_run(tmp_path / "run", (20, 40))
    begun = time.time() - 10 * HOUR
    for number, (first, last) in enumerate(starts):
        started(root, number, range(first, last + 1), begun + 30 * number)
    for path in (root / "checkpoint-20").iterdir():
        os.utime(path, (begun + 33.5, begun + 33.5))
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 20}}))
    assert len([line for line in plan.warnings if line.startswith(gap)]) == 1
    assert len([line for line in plan.warnings if "no events from" in line]) == 1
