"""What somebody puts at a name between the commit of a surgery and its recovery."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsurgeon.errors import InterruptedSurgery
from ckptsurgeon.transaction import giving_up, journal
from tests.faults import toy
from tests.faults.give_up import act_undo, visible
from tests.faults.inject import Fault, count_calls, outcome
from tests.faults.world import workplace
from tests.support.snapshot import HOME, Snapshot, differs, snapshot


@pytest.fixture
def world() -> Iterator[Path]:
    with workplace() as place:
        toy.build(place)
        yield place


def seen(world: Path) -> Snapshot:
    return visible(snapshot(world, own=True))


def _saved_before_the_undo_went_on(world: Path) -> Path:
    """An undo is cut off before step 200 comes back, and a trainer saves a step 200 of its own."""
    toy.act_rollback(world)
    with workplace() as other:
        toy.build_rolled_back(other)
        at = count_calls(lambda: act_undo(other)).index("rename step200") + 1
    assert outcome(lambda: act_undo(world), Fault("KILL", at)).code == -9
    theirs = world / "run/step200"
    theirs.mkdir()
    (theirs / "shard0").write_bytes(b"of a trainer")
    return theirs


def test_recover_refuses_a_name_that_somebody_took_meanwhile(world: Path) -> None:
    """What lies there is not the step that the undo brings back."""
    before = seen(world)
    theirs = _saved_before_the_undo_went_on(world)
    cut = seen(world)
    with pytest.raises(InterruptedSurgery, match=r"run/step200: it was made since") as refused:
        journal.recover(world / "run", logs=toy.logs(world))
    assert "move it away" in str(refused.value.next)
    assert seen(world) == cut
    shutil.rmtree(theirs)
    assert journal.recover(world / "run", logs=toy.logs(world)).outcome == "finished"
    assert differs(seen(world), before, times=False) is None


def test_what_took_the_name_stays_where_the_surgery_is_given_up(world: Path) -> None:
    theirs = _saved_before_the_undo_went_on(world)
    run, logs = world / "run", toy.logs(world)
    done = giving_up.give_up(run, giving_up.plan(run, logs=logs), logs=logs)
    assert (done.outcome, dict(done.left)) == ("given up", {"step200": ""})
    assert (theirs / "shard0").read_bytes() == b"of a trainer"
    shutil.rmtree(theirs)
    with workplace() as other:
        toy.build_rolled_back(other)
        assert differs(seen(world), seen(other), times=False) is None


def test_a_step_that_is_saved_again_after_its_move_stays(world: Path) -> None:
    """The move is done, so its old name is free for whoever wants it."""
    with workplace() as other:
        toy.build(other)
        at = count_calls(lambda: toy.act_rollback(other)).index("rename step200") + 2
    assert outcome(lambda: toy.act_rollback(world), Fault("KILL", at)).code == -9
    again = world / "run/step200"
    assert not again.exists()
    again.mkdir()
    assert journal.recover(world / "run", logs=toy.logs(world)).outcome == "finished"
    assert list(again.iterdir()) == []
    assert (world / "run" / HOME / "attic/0001/step200/shard0").is_file()
