"""A rollback or a cut in a bucket is done or not, whichever of its requests is the last."""

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
"""A command is killed at one request of so many; which one is the first depends on the command."""
COMMANDS = (["rollback", "--to", "4"], ["truncate-logs", "--after", "6", "--keep-tb", "cut"])


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("undo", [False, True])
def test_killed_at_each_request(
    undo: bool, words: list[str], store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    """The run is as before or, after `recover`, as after, and nothing else is left."""
    first = [*words, "--yes", "-C", RUN]
    last = ["undo", "--yes", "-C", RUN] if undo else first
    run = long_run(tmp_path / "run")

    def anew() -> None:
        for key in buckets.keys(store):
            store.delete_object(Bucket="bucket", Key=key)
        fill(store, run)
        if undo:
            assert look(*first).exit_code == 0

    anew()
    before = objects(store)
    assert look(*last).exit_code == 0
    states, seen = (before, objects(store)), set()
    for number in range(COMMANDS.index(words) + undo, 500, STRIDE):
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
