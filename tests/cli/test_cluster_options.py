"""--on, --sbatch and --resume, as far as they need no cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsurgeon.cli.tally import Done, Measured, Tally
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.workers import host
from tests.conftest import Trained
from tests.support.launch import REPO
from tests.support.snapshot import differs, snapshot


def surgeon(*words: object, cwd: Path | None = None) -> tuple[int, str, str]:
    env = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", *map(str, words)],
        cwd=cwd, env={**env, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_script_repeats_the_command_and_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    words = ("average", "6", "8", "--on", "slurm", "--sbatch", "nodes=4", "--sbatch=time=1:00:00")
    code, script, _ = surgeon(*words, cwd=folder)
    assert code == 0
    lines = script.splitlines()
    assert lines[-1] == "exec srun ckptsurgeon average 6 8 --on slurm --yes --resume"
    assert lines[-2] == f"cd '{tmp_path}/it'\"'\"'s here' || exit 1"
    assert {"#SBATCH --nodes=4", "#SBATCH --time=1:00:00", "#SBATCH --requeue"} <= {*lines}
    assert not any("ntasks" in line for line in lines)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    code, script, _ = surgeon("verify", "--level", "4", "--on=slurm", "--sbatch", "ntasks=8")
    assert script.rstrip().endswith("exec srun ckptsurgeon verify --level 4 --on=slurm --yes")


def test_what_belongs_to_an_srun_is_refused_elsewhere() -> None:
    code, _, error = surgeon("average", "6", "8", "--sbatch", "ntasks=8")
    assert code == 2 and "--sbatch belongs to --on slurm" in error
    code, _, error = surgeon("average", "6", "8", "--on", "slurm", "--sbatch", "wrap=a b")
    assert code == 2 and "is not a plain sbatch option" in error
    pytest.importorskip("dask_jobqueue")
    code, _, error = surgeon("average", "6", "8", "--on", "slurm")
    assert code == 2 and "is for the tasks of an srun" in error


def test_a_surgery_with_records_in_threads_is_the_usual_one(trained: Trained) -> None:
    root = trained(zero=1, dtype="bf16")
    other = Path(shutil.copytree(root, root.with_name("other")))
    words = ("average", "6", "8", "--no-tb-note", "--yes", "-C")
    assert surgeon(*words, root, "--resume")[0] == 0
    assert surgeon(*words, other)[0] == 0
    found = snapshot(root, own=True)
    assert differs(found, snapshot(other, own=True), times=False) is None
    code, _, error = surgeon(*words, root, "--resume")
    assert code == 1 and "receipt 0001 has done this already" in error, "as of a job requeued late"
    assert snapshot(root, own=True) == found
    assert surgeon("scale", "weight", "--by", "0.5", *words[3:], root, "--resume")[0] == 0


def test_the_slowest_node_is_named() -> None:
    tally = Tally(seconds=2.0)
    for name, seconds in (("n1", 1.0), ("n2", 3.0), ("n3", 1.0)):
        tally.add(Done(name, f"tcp://{name}", seconds, 10**9, None))
    said = "3 workers on 3 nodes · 3 jobs · 3.0 GB, 1.5 GB/s · "
    assert str(tally) == said + "slowest n2: 3.0 times as long for a byte"


def test_a_worker_of_another_version_does_no_job() -> None:
    """Also one that comes when the others were asked already."""
    with pytest.raises(SurgeryError, match=f"a worker on {host()} has .*; ckptsurgeon is 0.9 here"):
        Measured(len, "0.9")([])
