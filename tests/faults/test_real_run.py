"""Killed or refused by the disk at any call of a real surgery, on shards of two ranks."""

from __future__ import annotations

from tests.conftest import Trained
from tests.faults.inject import KILLED
from tests.faults.real_run import surgeries
from tests.faults.sweep import faults, faults_in_recovery, reports


def test_a_real_surgery_is_before_or_after(trained: Trained) -> None:
    apply, undo, compact = surgeries(trained(ranks=2))
    found = reports(
        (apply, faults, ("KILL",)),
        (undo, faults, ("KILL",)),
        (compact, faults, ("KILL",)),
        (compact, faults, ("FULL",), (True,), 3),
        (apply, faults, ("FULL",), (True,), 3),
        (undo, faults, ("EIO",), (False,), 3),
        (apply, faults_in_recovery, ("KILL",), (False,), 40),
    )
    violations = [violation for report in found for violation in report.violations]
    assert not violations, "\n".join(violations[:20])
    assert sum(report.points for report in found) >= 200
    assert set(found[0].codes) == set(found[1].codes) == {KILLED}
    # A restored world has no holes, so its compact makes fewer calls than were counted.
    assert set(found[2].codes) == {KILLED, 0}
