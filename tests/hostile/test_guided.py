"""The same readers under a fuzzer that follows their coverage, where atheris is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsurgeon.files.archives.archive import Archive
from tests.hostile.hostile_run import LOOPS, bare_loop
from tests.hostile.mutations import RECIPE
from tests.support.launch import REPO
from tests.support.torch_files import plain_shard, save

RUNS = {"pickles": 1000, "archives": 750, "events": 1500, "recipes": 300}
ROUNDS = [pytest.param(1, id="short"), pytest.param(40, id="long", marks=pytest.mark.slow)]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed"
)


def seed(kind: str, folder: Path) -> bytes:
    """One good input, from which the fuzzer starts."""
    shard = save(plain_shard(), folder / "shard.pt")
    if kind == "pickles":
        return Archive.open(shard).pickle()
    if kind == "archives":
        return save({"a": 1.0, "b": plain_shard()["views"]}, folder / "small.pt").read_bytes()
    if kind == "recipes":
        return RECIPE
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "logs")) as writer:
        writer.add_scalar("lm loss", 1.0, 1)
    return next((folder / "logs").iterdir()).read_bytes()


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.long
def test_no_input_that_coverage_leads_to_escapes(tmp_path: Path, kind: str, rounds: int) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "good").write_bytes(seed(kind, tmp_path))
    command = [sys.executable, "-m", "tests.hostile.guided", kind, f"-runs={RUNS[kind] * rounds}"]
    seconds = max(1, round(10 * LOOPS * bare_loop()))  # of one input: only a hang lasts as long
    limits = ["-rss_limit_mb=1024", f"-timeout={seconds}"]
    options = ["-seed=1", *limits, f"-artifact_prefix={tmp_path}/"]
    # Forked by a small process: the peak of one that a large one starts is at least as large.
    command = ["sh", "-c", '"$@"; exit $?', "sh", *command, *options, str(corpus)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(corpus.iterdir())) > 5, "the fuzzer found no new path: is it instrumented?"
