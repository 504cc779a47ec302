"""A surgery in a bucket is done or not, whichever of its requests is the last, and so are its undo
and its redo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.remote import buckets
from tests.remote.buckets import RUN, fill, killed_at, left_over, long_run, objects
from tests.remote.conftest import Look
from tests.remote.proxy import Proxy

pytestmark = [pytest.mark.remote, pytest.mark.slow]
STRIDE = 7
"""A command is killed at one request of so many; which one is the first depends on the case."""
COMMANDS = (
    "rollback --to 4",
    "truncate-logs --after 6 --keep-tb cut",
    "truncate-tb-events --after 6",
    "set lr=3e-5 weight_decay=0.2",
    "reset moments",
)
CASES = [
    *((words,) for words in COMMANDS),
    *((words, "undo") for words in COMMANDS if words != "set lr=3e-5 weight_decay=0.2"),
    ("rollback --to 4", "undo", "redo"),
    ("set lr=3e-5 weight_decay=0.2", "undo", "redo"),
]
"""Commands of which the last is killed; `undo` of a `set` is killed in test_surgery.py."""


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_killed_at_each_request(
    case: tuple[str, ...], store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    """The run is as before or, after `recover`, as after, and nothing else is left."""
    *first, last = [[*words.split(), "--yes", "-C", RUN] for words in case]
    run = long_run(tmp_path / "run")

    def anew() -> None:
        for key in buckets.keys(store):
            store.delete_object(Bucket="bucket", Key=key)
        fill(store, run)
        for words in first:
            assert look(*words).exit_code == 0

    anew()
    before = objects(store)
    assert look(*last).exit_code == 0
    states, seen = (before, objects(store)), set()
    for number in range(CASES.index(case) % STRIDE, 500, STRIDE):
        anew()
        code = killed_at(between, number, look, last, done=bool(number % 2))
        assert code in (0, -9), (number, code)
        if code == 0:
            break
        recovered = look("recover", "-C", RUN)
        assert recovered.exit_code == 0, (number, recovered.output)
        now = objects(store)
        assert now in states, (number, recovered.output)
        assert left_over(store) == [], number
        assert look("verify", "-C", RUN).exit_code == 0
        seen.add(states.index(now))
    assert code == 0 and objects(store) == states[1] and seen == {0, 1}
