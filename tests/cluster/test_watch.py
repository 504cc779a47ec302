"""A watch in jobs of a real SLURM: on two nodes, requeued, and killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ckptsurgeon import Run
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard.event import ASKED, READY
from ckptsurgeon.look.ready import ready
from tests.cluster.conftest import Cluster, until
from tests.support.launch import REPO, launch

pytestmark = pytest.mark.cluster
FAULTY = REPO / "tests/guard/nan_weights"
Jobs = Callable[..., str]


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of two ranks that has met bad data."""
    root = tmp_path_factory.mktemp("diverged") / "run"
    began = time.monotonic()
    launch(
        "--config=train/configs/poison.yaml", "--from-scratch", f"save={root}", f"data={corpus}",
        "log_interval=100", "save_interval=100", "poison=[300,400]", "train_iters=410", ranks=2,
    )  # fmt: skip
    root.with_name("minutes").write_text(str((time.monotonic() - began) / 60))
    return root


def copy(diverged: Path, tmp_path: Path, iterations: int) -> Path:
    root = tmp_path / "run"
    subprocess.run(["cp", "-a", diverged, root], check=True)
    config = root / "train.yaml"
    config.write_text(config.read_text().replace("train_iters: 410", f"train_iters: {iterations}"))
    return root


def healthy(diverged: Path, tmp_path: Path, iterations: int) -> Path:
    """The same before its bad data, which are good."""
    root = copy(diverged, tmp_path, iterations)
    config = root / "train.yaml"
    config.write_text(re.sub(r"^poison:\n(- \d+\n)+", "", config.read_text(), flags=re.M))
    words = ["rollback", "--to", "200", "--yes", "-C", root]
    subprocess.run([sys.executable, "-m", "ckptsurgeon", *words], check=True)
    return root


def policy(tmp_path: Path, **keys: object) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(json.dumps({"watch": {"do": "apply", "every": 0.5, **keys}}))
    return file


def saved(root: Path) -> int:
    look_again()
    return max(Run.open(root).steps())


def test_a_job_on_two_nodes_heals_and_ends_well(
    cluster: Cluster, job: Jobs, diverged: Path, tmp_path: Path
) -> None:
    root = copy(diverged, tmp_path, 600)
    number = job(root, "--nodes", 2, "--watch", policy(tmp_path, on=["diverged", "ended"]))
    shown = cluster.ends(number)
    said = (tmp_path / "job.out").read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert [(each.cause, each.state) for each in events.read(root)] == [("diverged", READY)]
    (receipt,) = Run.open(root).receipts()
    assert receipt.why.startswith("watch 0001: diverged at 30"), receipt.why
    assert saved(root) == 600 and ready(Run.open(root), level=2).ready
    assert not (root / "kill-switch").exists() and shown["NumNodes"] == "2"


def test_a_rank_that_is_killed_and_a_requeue(
    cluster: Cluster, job: Jobs, diverged: Path, tmp_path: Path
) -> None:
    root = copy(diverged, tmp_path, 2500)
    number = job(root, "--nodes", 2, "--watch", policy(tmp_path, on=["ended"]))
    until(lambda: saved(root) >= 600)
    os.kill(int(json.loads((root / "trainer.pid").read_text())["pid"]), signal.SIGKILL)
    until(lambda: [each.state for each in events.read(root)] == [READY])
    until(lambda: saved(root) >= 1000)
    cluster("scontrol", "requeue", number)
    shown = cluster.ends(number)
    said = (tmp_path / "job.out").read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert shown["Restarts"] == "1" and saved(root) == 2500
    assert [each.cause for each in events.read(root)] == ["ended"], said


def test_weights_that_become_nan_heal(
    cluster: Cluster, job: Jobs, diverged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = healthy(diverged, tmp_path, 600)
    path = os.pathsep.join([str(FAULTY), cluster.environment["PYTHONPATH"]])
    monkeypatch.setitem(cluster.environment, "PYTHONPATH", path)
    monkeypatch.setitem(cluster.environment, "NAN_AT", "350")
    monkeypatch.setitem(cluster.environment, "NAN_ONCE", str(tmp_path / "was"))
    number = job(
        root, "--nodes", 1, "--nproc-per-node", 2, "--watch", policy(tmp_path, on=["diverged"])
    )
    shown = cluster.ends(number)
    said = (tmp_path / "job.out").read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert [(each.cause, each.step) for each in events.read(root)] == [("nan", 350)], said
    assert saved(root) == 600 and ready(Run.open(root), level=2).ready


def test_a_rate_that_is_too_high_is_treated_within_the_bounds(
    cluster: Cluster, job: Jobs, diverged: Path, tmp_path: Path
) -> None:
    root = healthy(diverged, tmp_path, 900)
    words = ["set-lr", "0.5", "--yes", "-C", root]
    subprocess.run([sys.executable, "-m", "ckptsurgeon", *words], check=True)
    rule = policy(tmp_path, on=["diverged"], min_steps=50)
    number = job(root, "--nodes", 1, "--nproc-per-node", 2, "--watch", rule)
    shown = cluster.ends(number)
    said = (tmp_path / "job.out").read_text()
    found = events.read(root)
    assert found and found[0].cause in ("diverged", "nan"), said
    healed = (shown["JobState"], saved(root), found[-1].state) == ("COMPLETED", 900, READY)
    assert healed or found[-1].state == ASKED, said
    assert ready(Run.open(root), level=2).ready


def test_a_torn_save_is_passed_over(
    cluster: Cluster, job: Jobs, diverged: Path, tmp_path: Path
) -> None:
    root = healthy(diverged, tmp_path, 1500)
    number = job(
        root,
        "--nodes",
        1,
        "--nproc-per-node",
        2,
        "--watch",
        policy(tmp_path, on=["ended"], every=5),
    )
    until(lambda: saved(root) >= 600)
    trainer = int(json.loads((root / "trainer.pid").read_text())["pid"])
    os.kill(trainer, signal.SIGSTOP)
    step = Run.open(root).latest()
    shard = max((root / f"global_step{step}").glob("*"), key=lambda path: path.stat().st_size)
    os.truncate(shard, 100)
    os.kill(trainer, signal.SIGKILL)
    shown = cluster.ends(number)
    said = (tmp_path / "job.out").read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert Run.open(root).receipts()[-1].why.startswith("ready:"), said
    assert saved(root) == 1500 and ready(Run.open(root), level=2).ready


def test_a_rank_that_hangs_on_another_node_is_ended_and_starts_again(
    cluster: Cluster, job: Jobs, diverged: Path, tmp_path: Path
) -> None:
    """srun alone can end what runs there. What takes twice as long as a whole training is no
    start."""
    root = copy(diverged, tmp_path, 1500)
    whole = float(diverged.with_name("minutes").read_text())
    rule = policy(tmp_path, on=["hung", "ended"], hung=2 * whole, stop_within=5)
    number = job(root, "--nodes", 2, "--watch", rule)
    until(lambda: saved(root) >= 600)
    os.kill(int(json.loads((root / "trainer.pid").read_text())["pid"]), signal.SIGSTOP)
    shown = cluster.ends(number)
    said = (tmp_path / "job.out").read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert [(each.cause, each.state) for each in events.read(root)] == [("hung", READY)], said
    assert saved(root) == 1500 and ready(Run.open(root), level=2).ready


def test_a_node_that_fails_costs_the_steps_since_the_last_save(
    cluster: Cluster, job: Jobs, diverged: Path, tmp_path: Path
) -> None:
    root = copy(diverged, tmp_path, 2500)
    number = job(root, "--nodes", 2, "--watch", policy(tmp_path, on=["ended"]))
    until(lambda: saved(root) >= 600)
    cluster("scontrol", "update", "nodename=zz2", "state=down", "reason=test")
    until(lambda: cluster.shows(number)["JobState"] == "PENDING")
    with suppress(AssertionError):  # it may have come back by itself
        cluster("scontrol", "update", "nodename=zz2", "state=resume")
    shown = cluster.ends(number)
    said = (tmp_path / "job.out").read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert shown["Restarts"] == "1" and saved(root) == 2500
    assert [each.state for each in events.read(root)] in ([], [READY]), said


def test_the_job_goes_on_without_its_watch(
    cluster: Cluster, job: Jobs, diverged: Path, tmp_path: Path
) -> None:
    root = copy(diverged, tmp_path, 1500)
    number = job(
        root, "--nodes", 1, "--nproc-per-node", 2, "--watch", policy(tmp_path, on=["hung"])
    )
    lock = root / ".ckptsurgeon" / "watcher"
    until(lock.exists)
    until(lambda: saved(root) >= 500)
    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    shown = cluster.ends(number)
    said = (tmp_path / "job.out").read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert saved(root) == 1500 and events.read(root) == []
