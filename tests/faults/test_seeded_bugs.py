"""A test of the tests: every seeded bug is found by the harness named here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.bugs import BUGS
from tests.faults.cut import real_cuts, unavailable
from tests.faults.power import cuts, cuts_in_recovery
from tests.faults.sweep import faults, run
from tests.faults.toy import REPLACE_ALL, ROLLBACK, SAVED_AGAIN, SET_LR, UNDO_SET

KILL = (SET_LR, faults, ("KILL",))
EIO = (SET_LR, faults, ("EIO",))
STRICT = (SET_LR, cuts, "strict")
EXT4 = (SET_LR, cuts, "ext4")

FOUND_BY: dict[str, tuple[Any, ...]] = {
    "staged bytes not fsynced": EXT4,
    "staged names not fsynced": STRICT,
    "no directory fsynced": STRICT,
    "journal renamed before its bytes are durable": EXT4,
    "commit record not durable before redo": STRICT,
    "end record written before the rest is durable": EXT4,
    "appended bytes never fsynced": EXT4,
    "end record written first": EIO,
    "pointer truncated in place": EIO,
    "no commit record": EIO,
    "no intent record": KILL,
    "no clean up after an error": EIO,
    "exit 1 after the commit point": EIO,
    "shards not silenced first": EIO,
    "silence not durable": STRICT,
    "shards truncated one after the other": (UNDO_SET, faults, ("EIO",)),
    "original not kept": EIO,
    "original renamed away first": EIO,
    "journal removed before the staging": EIO,
    "receipt in place before the edits": EIO,
    "moves not durable": (ROLLBACK, cuts, "strict"),
    "replaced twice at once": (REPLACE_ALL, faults, ("EIO",)),
    "freed name taken before it is durable": (SAVED_AGAIN, cuts, "strict"),
    "records of a killed attempt not fsynced": (
        UNDO_SET,
        cuts_in_recovery,
        "strict",
        1,
        "fsync_directory 0002",
    ),
}
"""The cheapest harness for each. SIGKILL and disk errors find none of those about fsync."""


def test_every_bug_has_its_harness() -> None:
    assert set(FOUND_BY) == set(BUGS)
    assert len(BUGS) >= 10


@pytest.mark.thinned(5)
@pytest.mark.parametrize("bug", FOUND_BY)
def test_seeded_bug_is_found(bug: str) -> None:
    report = run(*FOUND_BY[bug], bug=bug)
    assert report.violations, f"{report.points} points, and the bug was not found"


@pytest.mark.slow
def test_real_cut_finds_a_bug() -> None:
    reason = unavailable("ext4")
    if reason is not None:
        pytest.skip(reason)
    report = run(ROLLBACK, real_cuts, "ext4", 1, bug="appended bytes never fsynced")
    assert report.violations
