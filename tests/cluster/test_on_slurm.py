"""--on slurm: the tasks of a real SLURM do the long passes, and a requeued job goes on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsurgeon import Run, surgery
from tests.cluster.conftest import Cluster, until
from tests.conftest import Trained
from tests.support.launch import REPO
from tests.support.snapshot import differs, snapshot

pytestmark = pytest.mark.cluster
AVERAGE = ("average", "6", "8", "--no-tb-note")


@pytest.fixture
def nodes(cluster: Cluster) -> Cluster:
    pytest.importorskip("dask_jobqueue")
    return cluster


def surgeon(*words: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", *map(str, words)],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def submitted(nodes: Cluster, folder: Path, *words: object) -> str:
    """The number of the job whose script `--sbatch` prints; its words go to `job.out`."""
    more = ["ntasks=4", "nodes=2", "overcommit", f"output={folder}/job.out"]
    options = [word for each in more for word in ("--sbatch", each)]
    script = folder / "job.sbatch"
    script.write_text(surgeon(*words, "--on", "slurm", *options, cwd=folder))
    return nodes.submit(script)


def alone(root: Path) -> Path:
    other = Path(shutil.copytree(root, root.with_name("alone")))
    surgeon(*AVERAGE, "--yes", "-C", other, cwd=other)
    return other


def test_an_allocation_computes_and_reads(nodes: Cluster, trained: Trained, tmp_path: Path) -> None:
    root = trained(zero=1, dtype="bf16")
    wanted = snapshot(alone(root), own=True)
    ended = nodes.ends(submitted(nodes, tmp_path, *AVERAGE, "-C", root))
    said = (tmp_path / "job.out").read_text()
    assert ended["JobState"] == "COMPLETED", said
    assert differs(snapshot(root, own=True), wanted, times=False) is None
    assert re.search(r"\d workers? on \d nodes? · \d+ jobs?", said), said
    plain = surgeon("verify", "--level", "4", "-C", root, cwd=tmp_path)
    ended = nodes.ends(submitted(nodes, tmp_path, "verify", "--level", "4", "-C", root))
    said = (tmp_path / "job.out").read_text()
    assert ended["JobState"] == "COMPLETED" and plain in said, said
    assert not [*tmp_path.glob("dask-*.json")]


def shared(nodes: Cluster, folder: Path, root: Path, *more: str, end_all: int) -> str:
    """The number of a job whose four tasks share a surgery without Dask."""
    words = ["-m", "ckptsurgeon", *AVERAGE, "--yes", "-C", str(root), "--ranks-from-env", *more]
    lines = ["ntasks=4", "nodes=2", "overcommit", f"output={folder}/job.out"]
    script = folder / "ranks.sbatch"
    script.write_text(
        "\n".join(["#!/bin/bash", *(f"#SBATCH --{line}" for line in lines), ""])
        + f"exec srun --kill-on-bad-exit={end_all} {shlex.join([sys.executable, *words])}\n"
    )
    return nodes.submit(script)


def slow(nodes: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tasks have many jobs and say who works, in the folder that this is. No first job ends
    before the file `go` is there."""
    jobs = folder / "jobs"
    jobs.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os\nif 'SLURM_PROCID' in os.environ:\n"
        "    from ckptsurgeon.transaction import job_list as j, ranks\n"
        "    j.BATCH, j.STRETCH, j.LONG = 1 << 15, 1 << 12, 1 << 12\n"
        "    ranks.LOST_S = 5.0\n"
        "    import tests.cluster.slow_writes\n"
    )
    path = os.pathsep.join([str(folder), nodes.environment["PYTHONPATH"]])
    given = {"PYTHONPATH": path, "JOBS": str(jobs), "SECONDS": "0", "UNTIL": str(folder / "go")}
    for name, text in given.items():
        monkeypatch.setitem(nodes.environment, name, text)
    return jobs


def rank_of(process: int) -> int:
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next(int(word[13:]) for word in words if word.startswith(b"SLURM_PROCID="))


@pytest.mark.parametrize("end_all", [0, 1])
def test_tasks_without_dask_share_a_surgery_and_one_of_them_is_killed(
    cluster: Cluster, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    end_all: int,
) -> None:  # fmt: skip
    """srun ends all of them with it, and what is left is gone on with; or the last one does the
    jobs of that one."""
    root, said = trained(zero=1, dtype="bf16"), tmp_path / "job.out"
    before, wanted = snapshot(root), snapshot(alone(root), own=True)
    jobs = slow(cluster, tmp_path, monkeypatch)
    job = shared(cluster, tmp_path, root, end_all=end_all)
    until(lambda: len([*jobs.iterdir()]) == 4, said)
    victim = next(int(each.name) for each in jobs.iterdir() if rank_of(int(each.name)) == 1)
    os.kill(victim, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert cluster.ends(job)["JobState"] == "FAILED", "as one of its tasks"
    if end_all:
        assert Run.open(root).committed() is False, said.read_text()
        other = Path(shutil.copytree(root, root.with_name("other")))
        surgeon("recover", "-C", other, cwd=tmp_path)
        assert differs(snapshot(other, own=True), before, times=True) is None
        again = cluster.ends(shared(cluster, tmp_path, root, "--resume", end_all=1))
        assert again["JobState"] == "COMPLETED", said.read_text()
    assert differs(snapshot(root, own=True), wanted, times=False) is None
    assert re.search(r"\d workers on 2 nodes · \d+ jobs · .*slowest ", said.read_text())
    assert surgery.plan_undo(Run.open(root)).edits


def test_a_refusal_ends_all_tasks(nodes: Cluster, trained: Trained, tmp_path: Path) -> None:
    root = trained(zero=1, dtype="bf16")
    ended = nodes.ends(submitted(nodes, tmp_path, "average", "7", "8", "-C", root))
    assert ended["JobState"] == "FAILED" and ended["ExitCode"] == "2:0", ended
    assert "step 7" in (tmp_path / "job.out").read_text()
    assert not (root / ".ckptsurgeon").exists()


def test_a_requeued_job_goes_on_where_it_was(
    nodes: Cluster, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The surgeon is killed with its job while its workers compute."""
    root = trained(zero=1, dtype="bf16")
    wanted = snapshot(alone(root), own=True)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif 'SLURM_PROCID' in os.environ:\n"
        "    from ckptsurgeon.transaction import job_list as j\n"
        "    j.BATCH, j.STRETCH, j.LONG = 1 << 15, 1 << 12, 1 << 12\n"
        "    import tests.cluster.slow_writes\n"
    )
    path = os.pathsep.join([str(tmp_path), nodes.environment["PYTHONPATH"]])
    given = {"PYTHONPATH": path, "JOBS": str(tmp_path / "jobs"), "SECONDS": "0.1"}
    for name, text in given.items():
        monkeypatch.setitem(nodes.environment, name, text)
    job = submitted(nodes, tmp_path, *AVERAGE, "-C", root)
    record = root / ".ckptsurgeon/staging/0001.jobs"
    until(
        lambda: record.exists() and record.read_bytes().count(b'"crcs"') >= 3, tmp_path / "job.out"
    )
    nodes("scontrol", "requeue", job)
    ended = nodes.ends(job)
    said = (tmp_path / "job.out").read_text()
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1", said
    assert differs(snapshot(root, own=True), wanted, times=False) is None
    assert surgery.plan_undo(Run.open(root)).edits
