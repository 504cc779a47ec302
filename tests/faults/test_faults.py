"""Killed, or refused by the disk, at any call: the run is before or after, and the exit code says
which."""

from __future__ import annotations

import pytest

from tests.faults.inject import ERRORS, KILLED
from tests.faults.sweep import faults, faults_in_recovery, reports, sound
from tests.faults.toy import IN_THREADS, ROLLBACK, SCENARIOS, SET_LR, UNDO, UNDO_SET

BOTH = (False, True)
OTHERS = tuple(kind for kind in ERRORS if kind not in ("ENOSPC", "EIO"))


def test_kill_at_every_call() -> None:
    found = reports(*((scenario, faults, ("KILL",)) for scenario in SCENARIOS))
    sound(found, 300)
    assert all(set(report.codes) == {KILLED} for report in found)


def test_every_disk_error_at_every_call_once_and_for_good() -> None:
    found = reports(
        *((scenario, faults, ("ENOSPC", "EIO"), BOTH) for scenario in (ROLLBACK, UNDO)),
        *((scenario, faults, OTHERS, BOTH, 10) for scenario in (ROLLBACK, UNDO)),
    )
    sound(found, 900)
    assert all(set(report.codes) <= {1, 5} for report in found)


@pytest.mark.slow
def test_every_other_disk_error_at_every_call_once_and_for_good() -> None:
    found = reports(*((scenario, faults, OTHERS, BOTH) for scenario in (ROLLBACK, UNDO)))
    sound(found, 1200)
    assert all(set(report.codes) <= {1, 5} for report in found)


def test_full_disk_at_every_call() -> None:
    """Removals and renames go on when a disk is full, so that before the commit point all is taken
    back, and after it few calls are left that need space."""
    found = reports(*((scenario, faults, ("FULL",), BOTH) for scenario in (ROLLBACK, UNDO)))
    sound(found, 400)
    assert all(set(report.codes) == {0, 1, 5} for report in found)


def test_broken_and_short_calls_are_made_again() -> None:
    kinds = ("EINTR", "SHORT")
    once = reports(*((scenario, faults, kinds) for scenario in (ROLLBACK, UNDO)))
    sound(once, 250)
    assert all(set(report.codes) == {0} for report in once)
    sound(reports(*((scenario, faults, kinds, (True,)) for scenario in (ROLLBACK, UNDO))), 250)


def test_ctrl_c_at_every_call() -> None:
    found = reports(*((scenario, faults, ("CTRL-C",)) for scenario in SCENARIOS))
    sound(found, 300)
    assert all(set(report.codes) == {130, 5} for report in found)


def test_kill_at_every_call_of_a_recovery() -> None:
    sound(
        reports(
            (ROLLBACK, faults_in_recovery, ("KILL",), (False,), 14),
            (UNDO, faults_in_recovery, ("KILL",), (False,), 18),
        ),
        500,
    )


def test_disk_errors_at_every_call_of_a_recovery() -> None:
    found = reports(
        (ROLLBACK, faults_in_recovery, ("EIO", "FULL", "CTRL-C"), (False,), 34),
        (UNDO, faults_in_recovery, ("EIO", "FULL", "CTRL-C"), (False,), 34),
        (SET_LR, faults_in_recovery, ("EIO", "EINTR"), (True,), 34),
        (UNDO_SET, faults_in_recovery, ("EIO", "EINTR"), (True,), 34),
    )
    sound(found, 500)


def test_faults_while_threads_are_at_work() -> None:
    """The order of calls differs from run to run; the verdict must not."""
    found = reports(
        (IN_THREADS, faults, ("KILL",), (False,), 3),
        (IN_THREADS, faults, ("EIO", "CTRL-C"), BOTH, 3),
    )
    sound(found, 200)


@pytest.mark.slow
def test_kill_at_every_call_of_every_recovery() -> None:
    sound(reports(*((scenario, faults_in_recovery, ("KILL",)) for scenario in SCENARIOS)), 10_000)


@pytest.mark.slow
def test_every_fault_at_every_call_of_many_recoveries() -> None:
    kinds = ("EIO", "FULL", "EINTR", "SHORT", "CTRL-C")
    jobs = [(scenario, faults_in_recovery, kinds, BOTH, 5) for scenario in SCENARIOS]
    sound(reports(*jobs), 20_000)
