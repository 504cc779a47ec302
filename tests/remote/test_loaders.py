"""A trainer's own loader reads from the bucket what was promised there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.remote.buckets import RUN, fill, objects
from tests.remote.conftest import Look
from tests.support.launch import ON_CPU, REPO

pytestmark = [
    pytest.mark.remote,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
S3FS = Path(sys.prefix, "s3fs")
"""Where `make test-remote` puts s3fs, which wants a botocore of its own."""


def used(address: str) -> dict[str, Any]:
    """What torchtitan's trainer uses after torch's FsspecReader loaded its latest step by s3fs."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.remote.read_by_fsspec", address]
    paths = os.pathsep.join([str(S3FS), str(REPO)])
    environment = {**os.environ, **ON_CPU, "PYTHONPATH": paths}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not S3FS.is_dir(), reason="`make test-remote` installs s3fs")
def test_torchtitan_loads_what_was_promised(store: Any, look: Look, tmp_path: Path) -> None:
    from tests.support.dcp_trainers import torchtitan

    fill(store, torchtitan(tmp_path / "run"))
    before = objects(store)
    untouched = used(RUN)
    for words in (
        "rollback --to 4 --set lr=2e-3 --set beta1=0.8 --set eps=1e-6 --set weight_decay=0.3",
        "reset moments",
    ):
        done = look(*words.split(), "--yes", "-C", RUN)
        assert done.exit_code == 0, done.output
    now = used(RUN)
    assert (untouched["step"], now["step"]) == (6, 4)
    assert now["lr"] == [pytest.approx(2e-3 / 5)] * 2 and now["eps"] == [1e-6] * 2
    assert now["betas"] == [[0.8, 0.95]] * 2 and now["weight_decay"] == [0.3, 0.0]
    assert now["adam_step"] == [0] * 4 and now["moments"] == [0] * 8
    for _ in range(2):
        assert look("undo", "--yes", "-C", RUN).exit_code == 0
    assert objects(store) == before and used(RUN) == untouched
