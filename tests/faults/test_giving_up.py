"""A surgery that can't be finished, given up: what is still ours is as it was before it, what
somebody else wrote is left and named, and a kill anywhere in that changes nothing of it."""

from __future__ import annotations

import pytest

from tests.faults.give_up import DEEDS, SAVED_AGAIN, SURGERIES, UNDO, UNDO_SET, given
from tests.faults.sweep import reports, sound
from tests.faults.toy import REPLACE_ALL, ROLLBACK, SET_LR

SAMPLES = (
    (ROLLBACK, "write_anew", 29, 3),
    (UNDO, "put_another", 29, 0),
    (SET_LR, "append", 11, 3),
    (UNDO_SET, "write_anew", 11, 3),
    (REPLACE_ALL, "remove", 11, 0),
    (SAVED_AGAIN, "remove", 41, 0),
)


@pytest.mark.long
def test_what_somebody_wrote_is_left_and_the_rest_is_as_before() -> None:
    found = reports(*((scenario, given, *how) for scenario, *how in SAMPLES))
    sound(found, 40)
    assert sum(report.codes.get(5, 0) for report in found) > 20


@pytest.mark.slow
@pytest.mark.parametrize("deed", DEEDS)
def test_the_same_after_a_kill_at_every_call(deed: str) -> None:
    found = reports(*((scenario, given, deed) for scenario in SURGERIES))
    sound(found, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("deed", DEEDS)
def test_a_kill_at_every_call_of_giving_up(deed: str) -> None:
    found = reports(*((scenario, given, deed, 9, 1000) for scenario in SURGERIES))
    sound(found, 1000)
