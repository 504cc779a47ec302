"""An undo takes nothing from the versions that a bucket keeps, so nothing where they expire."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.remote.buckets import here, long_run
from tests.remote.conftest import Look
from tests.remote.proxy import Proxy

pytestmark = pytest.mark.remote
BUCKETS = ("bucket", "versions")


def filled(store: Any, bucket: str, run: Path) -> None:
    for name in here(run):
        store.put_object(Bucket=bucket, Key=f"run/{name}", Body=(run / name).read_bytes())


def there(store: Any, bucket: str) -> dict[str, bytes]:
    """The bytes of each object, but of those of the surgeon."""
    listed = store.list_objects_v2(Bucket=bucket, Prefix="run/")["Contents"]
    keys = [each["Key"] for each in listed if "ckptsurgeon" not in each["Key"]]
    return {
        key.removeprefix("run/"): store.get_object(Bucket=bucket, Key=key)["Body"].read()
        for key in keys
    }


def expire(store: Any, bucket: str) -> int:
    """Remove each version but the newest, as a rule of the bucket does; how many there were."""
    listed = store.list_object_versions(Bucket=bucket, Prefix="run/")
    old = [each for each in listed.get("Versions", ()) if not each["IsLatest"]]
    for each in old:
        store.delete_object(Bucket=bucket, Key=each["Key"], VersionId=each["VersionId"])
    return len(old)


def test_an_undo_needs_no_versions(store: Any, between: Proxy, look: Look, tmp_path: Path) -> None:
    run = long_run(tmp_path / "run")
    store.create_bucket(Bucket="versions")
    kept = {"Status": "Enabled"}
    store.put_bucket_versioning(Bucket="versions", VersioningConfiguration=kept)
    asked = []
    for bucket in BUCKETS:
        filled(store, bucket, run)
        at = f"s3://{bucket}/run"
        assert look("set-lr", "3e-5", "--yes", "-C", at).exit_code == 0
        assert there(store, bucket) != here(run)
        assert (expire(store, bucket) > 0) is (bucket == "versions")
        between.clear()
        undone = look("undo", "--yes", "-C", at)
        assert undone.exit_code == 0, undone.output
        assert there(store, bucket) == here(run)
        asked.append(Counter((each.method, bool(each.source)) for each in between.seen))
    assert asked[0] == asked[1]
