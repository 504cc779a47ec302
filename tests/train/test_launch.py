"""The trainer that the tests fork is the one that torchrun starts: same words, same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ON_CPU, REPO, launch
from tests.support.snapshot import snapshot
from tests.support.trained_run import first_line, losses

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.mark.slow
def test_a_forked_trainer_is_the_one_that_torchrun_starts(tmp_path: Path, corpus: Path) -> None:
    words = ["--config=train/configs/tiny.yaml", "--from-scratch", f"data={corpus}"]
    words += ["train_iters=4", "save_interval=4"]
    forked = launch(*words, f"save={tmp_path / 'forked'}", ranks=2)
    started = subprocess.run(
        [sys.executable, *TORCHRUN, "-m", "train", *words, f"save={tmp_path / 'started'}"],
        cwd=REPO,
        env={**os.environ, **ON_CPU},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert started.returncode == 0, started.stderr[-3000:]
    assert first_line(forked.stdout) == first_line(started.stdout)
    assert losses(forked.stdout) == losses(started.stdout)
    assert len(losses(forked.stdout)) == 4
    shards = [
        {name: content for name, (_, content, _) in snapshot(tmp_path / run).items()
         if name.endswith("optim_states.pt")}
        for run in ("forked", "started")
    ]  # fmt: skip
    assert len(shards[0]) == 2 and shards[0] == shards[1]
