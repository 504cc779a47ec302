"""OLMo-core's own Trainer saves into a bucket by its own client, and resumes there from what was
operated on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.remote.buckets import left_over, objects
from tests.remote.conftest import Look

pytestmark = [
    pytest.mark.remote,
    pytest.mark.olmo,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
PREFIX = "lab/7b/run/"
"""Its Trainer clears the folder of a step before it saves there, and none near a bucket's root."""
RUN = f"s3://bucket/{PREFIX}".rstrip("/")


@pytest.fixture
def clients(store: Any, tmp_path: Path) -> None:
    """The library keeps a client, and what it has read, for as long as its process lives."""
    import cached_path
    from cached_path.schemes import s3
    from olmo_core import io

    io._get_s3_client.cache_clear()
    s3._get_s3_resource_client.cache_clear()
    cached_path.set_cache_dir(tmp_path / "cached")


@pytest.mark.usefixtures("clients")
def test_its_trainer_resumes_from_what_was_operated_on(
    store: Any, look: Look, tmp_path: Path
) -> None:
    from tests.support.olmo_core import train

    assert sorted(train(tmp_path / "run", 6, folder=RUN).used) == [1, 2, 3, 4, 5, 6]
    before = objects(store, PREFIX)
    assert {f"step{step}/.metadata.json" for step in (2, 4, 6)} <= before.keys()
    for words in (
        "rollback --to 4 --set beta2=0.98 --set eps=1e-6 --set weight_decay=0.3",
        "reset moments",
    ):
        done = look(*words.split(), "--yes", "-C", RUN)
        assert done.exit_code == 0, done.output
    promise = json.loads(look("status", "--json", "-C", RUN).stdout)["promise"]
    operated = objects(store, PREFIX)
    used = train(tmp_path / "run", 6, folder=RUN).used
    assert sorted(used) == [5, 6]
    assert used[5]["lr"] == [pytest.approx(promise["lr"], rel=1e-12)] * 2
    for update in used.values():
        assert update["betas"] == [(0.9, 0.98)] * 2 and update["eps"] == [1e-6] * 2
        assert sorted(update["weight_decay"]) == [0.0, 0.3]
    assert (used[5]["adam_step"], used[5]["moments"]) == (0, 0)
    for key in objects(store, PREFIX).keys() - operated.keys():
        store.delete_object(Bucket="bucket", Key=f"{PREFIX}{key}")
    assert objects(store, PREFIX) == operated
    for _ in range(2):
        undone = look("undo", "--yes", "-C", RUN)
        assert undone.exit_code == 0, undone.output
    assert objects(store, PREFIX) == before and left_over(store, PREFIX) == []
