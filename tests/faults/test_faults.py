"""Killed, or refused by the disk, at any call: the run is before or after, and the exit code says
which."""

from __future__ import annotations

import pytest

from tests.faults.inject import ERRORS, KILLED
from tests.faults.sweep import faults, faults_in_recovery, reports, sound
from tests.faults.toy import IN_THREADS, ROLLBACK, SCENARIOS, SET_LR, UNDO, UNDO_SET

BOTH = (False, True)
OTHERS = tuple(kind for kind in ERRORS if kind not in ("ENOSPC", "EIO"))


def density(thin: int) -> pytest.MarkDecorator:
    """`make test` tries every `thin`-th of the calls that `make nightly` tries; a kill, each."""
    dense = pytest.param(1, id="dense", marks=pytest.mark.slow)
    return pytest.mark.parametrize("every", [pytest.param(thin, id="thin"), dense])


def test_kill_at_every_call() -> None:
    found = reports(*((scenario, faults, ("KILL",)) for scenario in SCENARIOS))
    sound(found, 300)
    assert all(set(report.codes) == {KILLED} for report in found)


@density(8)
@pytest.mark.long
def test_every_disk_error_at_every_call_once_and_for_good(every: int) -> None:
    found = reports(
        *((scenario, faults, ("ENOSPC", "EIO"), BOTH, every) for scenario in (ROLLBACK, UNDO)),
        *((scenario, faults, OTHERS, BOTH, 10 * every) for scenario in (ROLLBACK, UNDO)),
    )
    sound(found, 900 // every)
    assert all(set(report.codes) <= {1, 5} for report in found)


@pytest.mark.slow
def test_every_other_disk_error_at_every_call_once_and_for_good() -> None:
    found = reports(*((scenario, faults, OTHERS, BOTH) for scenario in (ROLLBACK, UNDO)))
    sound(found, 1200)
    assert all(set(report.codes) <= {1, 5} for report in found)


@density(8)
@pytest.mark.long
def test_full_disk_at_every_call(every: int) -> None:
    """Removals and renames go on when a disk is full, so that before the commit point all is taken
    back, and after it few calls are left that need space."""
    found = reports(*((scenario, faults, ("FULL",), BOTH, every) for scenario in (ROLLBACK, UNDO)))
    sound(found, 400 // every)
    assert all(set(report.codes) == {0, 1, 5} for report in found)


@density(8)
@pytest.mark.long
def test_broken_and_short_calls_are_made_again(every: int) -> None:
    kinds = ("EINTR", "SHORT")
    once = reports(*((each, faults, kinds, (False,), every) for each in (ROLLBACK, UNDO)))
    sound(once, 250 // every)
    assert all(set(report.codes) == {0} for report in once)
    for_good = reports(*((each, faults, kinds, (True,), every) for each in (ROLLBACK, UNDO)))
    sound(for_good, 250 // every)


@density(8)
@pytest.mark.long
def test_ctrl_c_at_every_call(every: int) -> None:
    found = reports(*((each, faults, ("CTRL-C",), (False,), every) for each in SCENARIOS))
    sound(found, 300 // every)
    assert all(set(report.codes) == {130, 5} for report in found)


@density(3)
def test_kill_at_every_call_of_a_recovery(every: int) -> None:
    found = reports(
        (ROLLBACK, faults_in_recovery, ("KILL",), (False,), 14 * every),
        (UNDO, faults_in_recovery, ("KILL",), (False,), 18 * every),
    )
    sound(found, 500 // every)


@density(2)
@pytest.mark.long
def test_disk_errors_at_every_call_of_a_recovery(every: int) -> None:
    found = reports(
        (ROLLBACK, faults_in_recovery, ("EIO", "FULL", "CTRL-C"), (False,), 34 * every),
        (UNDO, faults_in_recovery, ("EIO", "FULL", "CTRL-C"), (False,), 34 * every),
        (SET_LR, faults_in_recovery, ("EIO", "EINTR"), (True,), 34 * every),
        (UNDO_SET, faults_in_recovery, ("EIO", "EINTR"), (True,), 34 * every),
    )
    sound(found, 500 // every)


@density(3)
@pytest.mark.long
def test_faults_while_threads_are_at_work(every: int) -> None:
    """The order of calls differs from run to run; the verdict must not."""
    found = reports(
        (IN_THREADS, faults, ("KILL",), (False,), 3 * every),
        (IN_THREADS, faults, ("EIO", "CTRL-C"), BOTH, 3 * every),
    )
    sound(found, 200 // every)


@pytest.mark.slow
def test_kill_at_every_call_of_every_recovery() -> None:
    sound(reports(*((scenario, faults_in_recovery, ("KILL",)) for scenario in SCENARIOS)), 10_000)


@pytest.mark.slow
def test_every_fault_at_every_call_of_many_recoveries() -> None:
    kinds = ("EIO", "FULL", "EINTR", "SHORT", "CTRL-C")
    jobs = [(scenario, faults_in_recovery, kinds, BOTH, 5) for scenario in SCENARIOS]
    sound(reports(*jobs), 20_000)
