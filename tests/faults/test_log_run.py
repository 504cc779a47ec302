"""Killed or refused by the disk at any call of a rollback that cuts every kind of log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.inject import KILLED
from tests.faults.log_run import make, surgeries
from tests.faults.sweep import faults, faults_in_recovery, reports


@pytest.mark.parametrize(
    "every", [pytest.param(12, id="thin"), pytest.param(1, id="dense", marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_logs_are_cut_with_the_checkpoints_or_not_at_all(tmp_path: Path, every: int) -> None:
    apply, _ = surgeries(make(tmp_path / "run"))
    (found,) = reports((apply, faults, ("KILL",), (False,), every))
    assert not found.violations, "\n".join(found.violations[:20])
    assert set(found.codes) == {KILLED}
    assert found.points >= 60 // every


@pytest.mark.slow
def test_no_fault_leaves_a_log_between_both(tmp_path: Path) -> None:
    apply, undo = surgeries(make(tmp_path / "run"))
    found = reports(
        (undo, faults, ("KILL",)),
        (apply, faults, ("ENOSPC",), (False,)),
        (undo, faults, ("EIO",), (False,)),
        (apply, faults_in_recovery, ("KILL",), (False,), 20),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert set(found[0].codes) == {KILLED}
