"""The script of `relaunch --slurm` in jobs of a real SLURM: preempted, hung, in an array, held."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsurgeon import Run, look
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.launch.relaunch import compare
from tests.cluster.conftest import Cluster, until
from tests.conftest import Trained
from tests.support.trained_run import losses

pytestmark = pytest.mark.cluster
Jobs = Callable[..., str]


def saved(root: Path) -> int:
    look_again()
    return max(Run.open(root).steps())


def test_a_job_that_is_preempted_saves_and_goes_on(
    cluster: Cluster, job: Jobs, trained: Trained, tmp_path: Path
) -> None:
    """SLURM's signal comes to the script; its trainer saves, the job is requeued, and what it
    begins with is what it saved."""
    root, said = trained(ranks=2), tmp_path / "job.out"
    promise = look.inspect(Run.open(root)).promise
    number = job(root, "--nodes", 2, "--", "train_iters=1200", "save_interval=100000")
    until(lambda: said.exists() and " iteration       20/" in said.read_text(), said)
    cluster("scancel", "--batch", "--signal=USR1", number)
    shown = cluster.ends(number)
    text = said.read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert shown["Restarts"] == "1" and shown["NumNodes"] == "2"
    first, second = (json.loads(line) for line in text.splitlines() if line.startswith('{"step"'))
    assert compare(promise, json.dumps(first)) == []
    between = second["step"] - 1
    assert 20 <= between < 1200 and between in Run.open(root).steps()
    assert saved(root) == max(losses(text)) == 1200
    assert not (root / "kill-switch").exists()


def test_a_trainer_that_hangs_is_requeued_by_its_own_watchdog(
    cluster: Cluster, job: Jobs, trained: Trained, tmp_path: Path
) -> None:
    """No watch is beside it. The rank on the other node waits, says so, and ends the job."""
    root, said = trained(ranks=2), tmp_path / "job.out"
    number = job(root, "--nodes", 2, "--", "train_iters=1200", "save_interval=200", "watchdog=0.15")
    until(lambda: said.exists() and " iteration       20/" in said.read_text(), said)
    os.kill(int(json.loads((root / "trainer.pid").read_text())["pid"]), signal.SIGSTOP)
    shown = cluster.ends(number)
    text = said.read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert shown["Restarts"] == "1" and saved(root) == 1200, text
    assert "rank 1 has made no progress for 0.15 minutes" in text, text
    assert "the trainer hung; requeue 1 of 3" in text, text
    assert not list(root.glob("hung*")) and not (root / "kill-switch").exists()


def test_a_kill_switch_of_a_job_that_was_killed_does_not_stop_the_next_job(
    cluster: Cluster, job: Jobs, trained: Trained, tmp_path: Path
) -> None:
    """Its trainer hung when the signal came, and could neither save nor end."""
    root, said, switch = trained(ranks=2), tmp_path / "job.out", "kill-switch"
    first = job(root, "--nodes", 2, "--", "train_iters=1200", "save_interval=100000")
    until(lambda: said.exists() and " iteration       20/" in said.read_text(), said)
    os.kill(int(json.loads((root / "trainer.pid").read_text())["pid"]), signal.SIGSTOP)
    cluster("scancel", "--batch", "--signal=USR1", first)
    until((root / switch).exists, said)
    cluster("scancel", first)
    assert cluster.ends(first)["JobState"] == "CANCELLED"
    until(lambda: not cluster("squeue", "--noheader", f"--jobs={first}").strip(), said)
    assert (root / switch).read_text() == f"job {first}\n"
    shown = cluster.ends(job(root, "--nodes", 2, "--", "train_iters=40", "save_interval=100000"))
    text = said.read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert f"job {first} left this kill switch, and is gone: removed" in text, text
    assert saved(root) == 40 and not (root / switch).exists()


def test_each_job_of_an_array_goes_on_where_the_one_before_it_ended(
    cluster: Cluster, job: Jobs, trained: Trained, tmp_path: Path
) -> None:
    """`--array=0-1%1` is how a night of short jobs is queued: one after the other."""
    root, said = trained(ranks=2), tmp_path / "job.out"
    number = job(
        root, "--nodes", 2, "--sbatch", "array=0-1%1",
        "--", "train_iters=1200", "save_interval=100000",
    )  # fmt: skip
    until(lambda: said.exists() and " iteration       20/" in said.read_text(), said)
    (root / "kill-switch").write_text("a job of short time")
    until(lambda: saved(root) > 8, said)
    between = saved(root)
    (root / "kill-switch").unlink(missing_ok=True)
    states = [cluster.ends(f"{number}_{index}")["JobState"] for index in (0, 1)]
    assert states == ["COMPLETED", "COMPLETED"], said.read_text()
    steps = [
        json.loads(line)["step"] for line in said.read_text().splitlines() if line[:7] == '{"step"'
    ]
    assert steps == [9, between + 1] and saved(root) == 1200


def test_a_broken_promise_ends_the_job_with_4(
    cluster: Cluster, job: Jobs, trained: Trained, tmp_path: Path
) -> None:
    root, said = trained(), tmp_path / "job.out"
    code = 'import os; os.write(1, b\'{"step": 9, "lr": 1.0}\\n\')'
    own = {"command": [sys.executable, "-c", code]}
    (root / "ckptsurgeon.yaml").write_text(json.dumps({"relaunch": own}))
    shown = cluster.ends(job(root, "--nodes", 2))
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "4:0"), said.read_text()
    assert "lr: promised" in said.read_text() and shown["Restarts"] == "0"
