"""A surgery in a bucket is what it is on a disk, and it is done or not, whenever it is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.remote import buckets
from tests.remote.buckets import RUN, fill, killed_at, left_over, long_run, objects
from tests.remote.conftest import Look
from tests.remote.proxy import Proxy

pytestmark = pytest.mark.remote
SET = ["set-lr", "3e-5", "--yes", "-C", RUN]
UNDO = ["undo", "--yes", "-C", RUN]


STRIDE = 5
"""A command is killed at one request of so many: all of them take 8 minutes on one server."""


def test_set_and_undo(store: Any, look: Look, tmp_path: Path) -> None:
    """The objects are again what they were, what is said beside their bytes included."""
    run = long_run(tmp_path / "run")
    fill(store, run)
    before = objects(store)
    done = look(*SET)
    assert done.exit_code == 0 and "verified: step 9 uses lr 3.000e-05" in done.output
    after = objects(store)
    changed = {name for name in before if after[name] != before[name]}
    assert after.keys() - before.keys() == {"note 0"}
    assert changed == {"checkpoint-8/optimizer.pt", "checkpoint-8/scheduler.pt"}
    assert look("set-lr", "3e-5", "--yes", "-C", run).exit_code == 0
    for name in changed:
        assert after[name][0] == (run / name).read_bytes() and after[name][1:] == before[name][1:]
    undone = look(*UNDO)
    assert undone.exit_code == 0, undone.output
    assert objects(store) == before and left_over(store) == []


def test_tags_stay(store: Any, look: Look, tmp_path: Path) -> None:
    """Of objects that grow, are cut, written anew or moved, and those of an object that is moved
    aside. With one that has none there is nothing to ask for."""
    fill(store, long_run(tmp_path / "run"))
    named = [key for key in buckets.keys(store) if "trainer_state" not in key]
    for key in named:
        said = [{"Key": "keep it", "Value": key.rpartition("/")[2]}, {"Key": "a=b", "Value": "c+d"}]
        store.put_object_tagging(Bucket="bucket", Key=key, Tagging={"TagSet": said})
    before = tags(store)
    assert len(before) == len(named) > 4
    for words in SET, UNDO, ["rollback", "--to", "4", "--yes", "-C", RUN], UNDO:
        done = look(*words)
        assert done.exit_code == 0, done.output
        after = tags(store)
        moved = [key for key in before if key.startswith("run/checkpoint-8/")]
        gone = moved if words[0] == "rollback" else []
        kept = {key: before[key] for key in before if key not in gone}
        assert {key: after.get(key) for key in kept} == kept, words
        for key in gone:
            aside = [at for at in after if "/attic/" in at and at.endswith(key[4:])]
            assert [after[at] for at in aside] == [before[key]]


def tags(store: Any) -> dict[str, dict[str, str]]:
    """Of each object that has some."""
    found = {}
    for key in buckets.keys(store):
        got = store.get_object_tagging(Bucket="bucket", Key=key)["TagSet"]
        if got:
            found[key] = {each["Key"]: each["Value"] for each in got}
    return found


@pytest.mark.parametrize("done", [False, True])
def test_killed_at_each_request(
    done: bool, store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    """The request may have reached the store, or not. Then the run is as before or, after
    `recover`, as after, and nothing else is left."""
    fill(store, long_run(tmp_path / "run"))
    before = objects(store)
    assert look(*SET).exit_code == 0
    after = objects(store)
    assert look(*UNDO).exit_code == 0
    seen = set()
    for words, states in (SET, (before, after)), (UNDO, (after, before)):
        for number in range(int(done), 500, STRIDE):
            for key in buckets.keys(store):
                store.delete_object(Bucket="bucket", Key=key)
            fill(store, tmp_path / "run")
            if words is UNDO:
                assert look(*SET).exit_code == 0
            code = killed_at(between, number, look, words, done=done)
            assert code in (0, -9), (words, number, code)
            if code == 0:
                break
            recovered = look("recover", "-C", RUN)
            assert recovered.exit_code == 0, (words, number, recovered.output)
            now = objects(store)
            assert now in states, (words, number, recovered.output)
            assert left_over(store) == [], (words, number)
            seen.add((words[0], states.index(now)))
            assert look("verify", "-C", RUN).exit_code == 0
        assert code == 0
        assert objects(store) == states[1]
    assert seen == {("set-lr", 0), ("set-lr", 1), ("undo", 0), ("undo", 1)}
