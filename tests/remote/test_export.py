"""An export from a bucket has the bytes of one from a disk, and fetches the weights alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.files import safetensors_header
from tests.remote.buckets import LONG, RUN, fill, long_run, objects
from tests.remote.conftest import Look
from tests.remote.proxy import Proxy

pytestmark = pytest.mark.remote
SIZES = {"a": 1 << 20, "b": 400, "c": 3 << 20}


def test_an_export_is_that_of_a_disk(
    store: Any, between: Proxy, look: Look, tmp_path: Path
) -> None:
    run = long_run(tmp_path / "run")
    header = safetensors_header.encode(
        (n, "float32", (size // 4,), size) for n, size in SIZES.items()
    )
    weights = header + random.Random(2).randbytes(sum(SIZES.values()))
    (run / "checkpoint-8/model.safetensors").write_bytes(weights)
    fill(store, run)
    before = objects(store)
    here, there = tmp_path / "here", tmp_path / "there"
    options = ["--shard-size", "0.002", "-o"]
    assert look("export", "8", *options, here, "-C", run).exit_code == 0
    between.clear()
    found = look("export", "8", *options, there, "-C", RUN)
    assert found.exit_code == 0, found.output
    assert between.sent < len(weights) + 100_000 < LONG
    names = {path.name for path in there.iterdir()}
    assert names == {path.name for path in here.iterdir()} and len(names) == 3
    for name in names:
        assert (there / name).read_bytes() == (here / name).read_bytes()
    assert objects(store) == before
    again = look("export", "8", *options, there, "-C", RUN)
    assert again.exit_code == 2 and "already exists" in again.stderr
