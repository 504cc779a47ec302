"""A signal to any rank and the kill-switch file: finish the iteration, save, leave with 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.support.launch import REPO, launch
from tests.support.snapshot import snapshot
from tests.support.trained_run import losses


def start(run: Path, corpus: Path, ranks: int, *more: str) -> subprocess.Popen[str]:
    """A trainer that would go on for a long time, read up to its second loss line."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    process = subprocess.Popen(
        [
            sys.executable, *(launcher if ranks > 1 else []), "-m", "train",
            "--config=train/configs/tiny.yaml", "--from-scratch", f"save={run}", f"data={corpus}",
            "train_iters=100000", "save_interval=100000", *more,
        ],
        cwd=REPO,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(" iteration        2/"):
            return process
    raise AssertionError(f"the trainer ended with {process.wait()}")


def saved_at_the_end(process: subprocess.Popen[str], run: Path) -> str:
    """The rest of the output of a trainer that has saved its last iteration and left with 0."""
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    last = max(losses(rest), default=2)
    assert (run / "latest").read_text() == f"global_step{last}"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert not (run / "trainer.pid").exists()
    return rest


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        pytest.param(signal.SIGUSR1, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_stops_and_saves_all(
    tmp_path: Path, corpus: Path, number: signal.Signals, ranks: int
) -> None:
    run = tmp_path / "run"
    process = start(run, corpus, ranks)
    os.kill(json.loads((run / "trainer.pid").read_text())["pid"], number)
    rest = saved_at_the_end(process, run)
    assert f" {number.name} received: stopping after iteration" in rest
    shards = list((run / (run / "latest").read_text()).glob("*optim_states.pt"))
    assert len(shards) == ranks


@pytest.mark.long
def test_a_signal_that_comes_again_does_not_cut_the_save_short(
    tmp_path: Path, corpus: Path
) -> None:
    """scancel and systemd signal every process, and torchrun passes on what it got."""
    run = tmp_path / "run"
    process = start(run, corpus, 1)
    for _ in range(5000):  # to its end
        process.send_signal(signal.SIGTERM)
        if process.poll() is not None:
            break
        time.sleep(0.02)
    saved_at_the_end(process, run)


def test_while_the_kill_switch_is_there_no_job_trains(trained: Trained, tmp_path: Path) -> None:
    """In the middle of a run: tests/cli/test_slurm.py."""
    run, switch = trained(), tmp_path / "stop here"
    switch.touch()
    before = snapshot(run)
    done = launch(
        "--config", str(run / "train.yaml"), "train_iters=9", f"kill_switch_path={switch}"
    )
    assert f" kill switch {switch} is there: stopping after iteration 8" in done.stdout
    assert not losses(done.stdout)
    after = snapshot(run)
    changed = {name for name in after if after[name] != before.get(name)}
    assert {name for name in changed if "tfevents" not in name} == {"train.yaml"}
    assert after.keys() >= before.keys()
