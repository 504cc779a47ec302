"""A run that hangs ends by itself, says where, and leaves its checkpoints as they were."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import REPO, launch
from train.config import load_config
from train.errors import UsageError
from train.watchdog import HUNG, MARKER

TRAIN = [sys.executable, "-m", "train", "--config=train/configs/tiny.yaml", "--from-scratch"]


def start(rank: int, port: int, words: list[str]) -> subprocess.Popen[str]:
    group = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [*TRAIN, *words],
        cwd=REPO,
        env={**os.environ, **group, "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def files(run: Path) -> set[Path]:
    """All but the logs, which are written as they come."""
    return {path for path in run.rglob("*") if "tensorboard" not in path.parts}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.long
def test_a_rank_that_waits_for_one_that_is_gone_leaves_with_its_stacks(
    corpus: Path, tmp_path: Path
) -> None:
    words = [f"save={tmp_path}", f"data={corpus}", "train_iters=100000", "save_interval=100000",
             "watchdog=0.1"]  # fmt: skip
    port = free_port()
    with start(0, port, words) as waits, start(1, port, words) as stopped:
        try:
            assert waits.stdout is not None
            for line in waits.stdout:
                if line.startswith(" iteration        2/"):
                    break
            before = files(tmp_path)
            stopped.send_signal(signal.SIGSTOP)  # a node that is there and does nothing
            _, said = waits.communicate(timeout=300)
        finally:
            stopped.kill()
            waits.kill()
    assert waits.returncode == HUNG
    assert "error: rank 0 has made no progress for 0.1 minutes" in said
    assert "all_reduce" in said.partition("where it hung:")[2]
    assert files(tmp_path) == before | {tmp_path / MARKER}


def test_a_run_that_goes_on_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    words = [f"save={tmp_path}", f"data={corpus}", "watchdog=0.2"]
    launch("--config=train/configs/tiny.yaml", "--from-scratch", *words)


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match=r"watchdog is 0\.0; it must be above 0"):
        load_config(Path("train/configs/tiny.yaml"), ["save=x", "data=y", "watchdog=0"])
