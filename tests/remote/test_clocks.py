"""A store's clock that is an hour off decides, and nothing is taken for new or old by ours."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.transaction.lock import Holder
from tests.remote.buckets import RUN, fill, left_over, long_run, objects
from tests.remote.conftest import Look
from tests.remote.proxy import Proxy

pytestmark = pytest.mark.remote
SET = ["set-lr", "3e-5", "--yes", "-C", RUN]
HOLDER = Holder("4711", "elsewhere", "", 0, 1, 1, 0, "set: lr", "?")


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_surgery_and_its_undo(
    ahead_s: int, store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    fill(store, long_run(tmp_path / "run"))
    before = objects(store)
    between.ahead_s = ahead_s
    for words in (SET, *([each, "--yes", "-C", RUN] for each in ("undo", "redo", "undo"))):
        done = look(*words)
        assert done.exit_code == 0, (words, done.output)
        assert left_over(store) == []
    assert objects(store) == before


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_lock_is_as_old_as_the_store_says(
    ahead_s: int, store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    """One that was just made is no old one, though by this clock it is."""
    fill(store, long_run(tmp_path / "run"))
    record = json.dumps(asdict(HOLDER)).encode()
    store.put_object(Bucket="bucket", Key="run/.ckptsurgeon/lock", Body=record)
    between.ahead_s = ahead_s
    found = look(*SET)
    assert found.exit_code == 1 and "another surgery is under way" in found.stderr, found.output
    got = store.get_object(Bucket="bucket", Key="run/.ckptsurgeon/lock")
    assert got["Body"].read() == record
