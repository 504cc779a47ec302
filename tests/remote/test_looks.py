"""Whatever only looks says of a run in a bucket what it says of the same run on a disk."""

from __future__ import annotations

import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.disk import cache
from ckptsurgeon.remote import mirror
from tests.formats.matrix import FORMATS
from tests.remote.conftest import Look
from tests.remote.servers import upload
from tests.support.event_logs import spiked, write_log
from tests.support.tiny_run import make_run

pytestmark = [
    pytest.mark.remote,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
LOOKS = (
    ["status"],
    ["show"],
    ["log"],
    *(["verify", "--level", str(level)] for level in range(5)),
    ["doctor"],
    ["doctor", "--vitals"],
    ["advise"],
)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that were not fetched are no zeros, and nothing is fetched but what is asked for: who
    reads a byte too many reads a lie."""
    hollow = cache.make_hollow

    def make(path: Path, size: int, mtime_ns: int) -> None:
        hollow(path, size, mtime_ns)
        cache.fill(path, 0, b"\xa5" * size, mtime_ns)

    monkeypatch.setattr(cache, "make_hollow", make)
    for name, value in {"GRAIN": 1, "SMALL": 0, "GAP": 0}.items():
        monkeypatch.setattr(mirror, name, value)


def same(look: Look, words: list[str], folder: Path, address: str, at: str = "--json") -> str:
    """What both say; the test fails where they differ in more than the address."""
    here, there = (look(*words, *at.split(), "-C", where) for where in (folder, address))
    assert here.exit_code == there.exit_code, (words, here.output, there.output, there.exception)
    for one, other in ((here.stdout, there.stdout), (here.stderr, there.stderr)):
        said = one.replace(str(folder), address)
        assert other.split() == said.split(), words  # lines break where paths are longer
    assert there.stdout, (words, there.stderr)
    return there.stdout


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", FORMATS)
def test_each_format(
    name: str, run_of: Callable[[str], Path], store: Any, look: Look, tmp_path: Path
) -> None:
    prefix = f"runs/{name.replace(', ', '-').replace(' ', '_')}"
    run = tmp_path / prefix
    shutil.copytree(run_of(name), run)
    write_log(run / "tb", spiked(40, 30))
    upload(store, run, prefix)
    for words in LOOKS:
        found = same(look, words, run, f"s3://bucket/{prefix}")
        assert json.loads(found)["schema"]
    steps = [
        step["step"] for step in json.loads(look("status", "--json", "-C", run).stdout)["steps"]
    ]
    same(look, ["diff", *map(str, steps[-2:])], run, f"s3://bucket/{prefix}")
    same(look, ["diff", "--tensors", *map(str, steps[-2:])], run, f"s3://bucket/{prefix}")
    same(look, ["status"], run, f"s3://bucket/{prefix}", at="")


def test_a_hole_of_a_mirror_is_no_run_of_zeros(
    store: Any, look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pass that skips the holes of a sparse shard skips none here."""
    for name, value in {"GRAIN": 1, "SMALL": 0, "GAP": 0}.items():
        monkeypatch.setattr(mirror, name, value)
    run = make_run(tmp_path / "run")
    with zipfile.ZipFile(run / "checkpoint-4" / "optimizer.pt", "a") as archive:
        archive.writestr("optimizer/data/0", random.Random(1).randbytes(1 << 20))
    upload(store, run, "run")
    found = same(look, ["verify", "--level", "3"], run, "s3://bucket/run")
    assert json.loads(found)["findings"] == []
