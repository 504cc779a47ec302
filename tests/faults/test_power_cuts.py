"""After a power cut at any moment, by the model or a real one, the run is before or after."""

from __future__ import annotations

import pytest

from tests.faults.cut import real_cuts, unavailable
from tests.faults.power import cuts, cuts_in_recovery
from tests.faults.sweep import reports, sound
from tests.faults.toy import ROLLBACK, SCENARIOS, SET_LR, UNDO, UNDO_SET

RULES = ("strict", "ext4")


@pytest.mark.long
def test_every_state_of_a_cut() -> None:
    sound(reports(*((scenario, cuts, "strict") for scenario in (ROLLBACK, UNDO))), 400)


@pytest.mark.slow
def test_every_state_of_every_cut() -> None:
    sound(reports(*((scenario, cuts, rules) for scenario in SCENARIOS for rules in RULES)), 1400)


@pytest.mark.parametrize(
    ("every", "at_least"),
    [
        pytest.param(4, 250, id="thin"),
        pytest.param(1, 1800, id="dense", marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_cut_during_the_recovery_from_a_kill(every: int, at_least: int) -> None:
    found = reports(
        (ROLLBACK, cuts_in_recovery, "strict", 32 * every),
        (SET_LR, cuts_in_recovery, "strict", 32 * every),
        (UNDO, cuts_in_recovery, "strict", 16 * every),
        (UNDO_SET, cuts_in_recovery, "strict", 16 * every),
        (ROLLBACK, cuts_in_recovery, "ext4", 32 * every),
        (UNDO, cuts_in_recovery, "ext4", 16 * every),
    )
    sound(found, at_least)


@pytest.mark.slow
def test_cut_during_every_other_recovery() -> None:
    jobs = [(scenario, cuts_in_recovery, rules, 2) for scenario in SCENARIOS for rules in RULES]
    sound(reports(*jobs), 40_000)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.long
def test_real_cuts(kind: str) -> None:
    reason = unavailable(kind)
    if reason is not None:
        pytest.skip(reason)
    # One after the other: the kernel's own threads share the two cores.
    found = [*reports((ROLLBACK, real_cuts, kind, 4)), *reports((UNDO, real_cuts, kind, 4))]
    sound(found, 50)
    assert all(0 in report.codes for report in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_real_cuts_at_every_call(kind: str) -> None:
    reason = unavailable(kind)
    if reason is not None:
        pytest.skip(reason)
    sound([*reports(*((scenario, real_cuts, kind) for scenario in SCENARIOS))], 300)
