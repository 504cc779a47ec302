"""Killed or refused by the disk at any call of a real surgery, on shards of two ranks."""

from __future__ import annotations

import pytest

from tests.conftest import Trained
from tests.faults.inject import KILLED
from tests.faults.real_run import surgeries
from tests.faults.sweep import faults, faults_in_recovery, reports


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.long
def test_a_real_surgery_is_before_or_after(trained: Trained, every: int) -> None:
    apply, undo, compact = surgeries(trained(ranks=2))
    found = reports(
        (apply, faults, ("KILL",), (False,), every),
        (undo, faults, ("KILL",), (False,), every),
        (compact, faults, ("KILL",), (False,), every),
        (compact, faults, ("FULL",), (True,), 2 * every),
        (apply, faults, ("FULL",), (True,), 2 * every),
        (undo, faults, ("EIO",), (False,), 2 * every),
        (apply, faults_in_recovery, ("KILL",), (False,), 40 * every),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert sum(report.points for report in found) >= 500 // every
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    # A restored world has no holes, so its compact makes fewer calls than were counted.
    assert set(found[2].codes) == {KILLED, 0}
