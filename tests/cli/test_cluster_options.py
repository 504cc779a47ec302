"""--on, --sbatch and --resume, as far as they need no cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.cli.tally import Done, Measured, Tally
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.recipe.file import from_data
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
    assert script.rstrip().endswith("exec srun ckptsurgeon verify --level 4 --on=slurm")


def test_a_script_for_tasks_without_dask_ends_all_with_one(tmp_path: Path) -> None:
    words = ("average", "6", "8", "--ranks-from-env", "--sbatch", "ntasks=8", "-y")
    code, script, _ = surgeon(*words, cwd=tmp_path)
    assert code == 0 and "#SBATCH --ntasks=8" in script and "#SBATCH --requeue" in script
    start = "exec srun --kill-on-bad-exit=1 ckptsurgeon average 6 8 --ranks-from-env -y --resume"
    assert script.splitlines()[-1] == start
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_what_belongs_to_an_srun_is_refused_elsewhere() -> None:
    code, _, error = surgeon("average", "6", "8", "--sbatch", "ntasks=8")
    assert code == 2 and "--sbatch belongs to --on slurm, or to --ranks-from-env" in error
    code, _, error = surgeon("average", "6", "8", "--on", "slurm", "--sbatch", "wrap=a b")
    assert code == 2 and "is not a plain sbatch option" in error
    pytest.importorskip("dask_jobqueue")
    code, _, error = surgeon("average", "6", "8", "--on", "slurm")
    assert code == 2 and "is for the tasks of an srun" in error


@pytest.mark.long
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


def ranks(
    of: int, *words: object, cwd: Path | None = None, step: int = 0, late: bool = False
) -> list[tuple[int, str, str]]:
    """What each task of an srun ends with; only the first one is started where it is `late`."""
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": str(step), "SLURM_NTASKS": str(of)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "ckptsurgeon", *map(str, words)],
            cwd=cwd,
            env={
                **os.environ, **slurm, "SLURM_PROCID": str(rank),
                "SLURMD_NODENAME": f"n{rank}", "PYTHONPATH": str(REPO),
            },
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(1 if late else of)
    ]  # fmt: skip
    said = [process.communicate() for process in started]
    return [(p.returncode, *each) for p, each in zip(started, said, strict=True)]


@pytest.mark.long
def test_the_tasks_of_an_srun_share_a_surgery_and_the_last_one_answers(trained: Trained) -> None:
    root = trained(zero=1, dtype="bf16", ranks=2)
    other = Path(shutil.copytree(root, root.with_name("other")))
    words = ("average", "6", "8", "--no-tb-note", "--yes", "-C")
    assert surgeon(*words, other)[0] == 0
    before = snapshot(root)
    *helpers, last = ranks(3, *words, root, "--ranks-from-env", "--dry-run")
    assert last[0] == 0 and "average steps 6, 8" in last[1]
    assert [(code, said) for code, said, _ in helpers] == [(0, "")] * 2
    assert snapshot(root) == before
    *helpers, last = ranks(3, *words, root, "--ranks-from-env")
    assert last[0] == 0 and "undo" in last[1], last
    assert " worker" in last[2] and " on " in last[2] and " jobs" in last[2], last[2]
    assert helpers == [(0, "", "")] * 2
    assert differs(snapshot(root, own=True), snapshot(other, own=True), times=False) is None
    words = ("average", "5", "8", "--yes", "-C")
    for code, said, error in ranks(3, *words, root, "--ranks-from-env", step=1):
        assert (code, said) == (2, "") and "step 5" in error
    (root / "recipe.yaml").write_text("set: {weight_decay: 0.2}\ntensorboard: {note: false}\n")
    done = ranks(2, "apply", root / "recipe.yaml", "--yes", "-C", root, "--ranks-from-env")
    assert [code for code, *_ in done] == [0, 0], done
    (root / "global_step8" / "mp_rank_00_model_states.pt").write_bytes(b"torn")
    first, last = ranks(2, "apply", root / "recipe.yaml", "--yes", "-C", root, "--ranks-from-env")
    assert first == (0, "", "") and last[0] == 1  # it may be late, so it does not look


@pytest.mark.long
def test_a_task_that_comes_beside_the_commit_or_after_it_does_nothing(trained: Trained) -> None:
    """An error of it would make srun end the last one."""
    root = trained(zero=1, dtype="bf16")
    words = ("average", "6", "8", "--no-tb-note", "--yes", "-C", root, "--ranks-from-env")
    run = Run.open(root)

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "editing":
            raise KeyboardInterrupt

    made = surgery.plan(run, from_data({"average": {"steps": [6, 8]}}))
    with pytest.raises(InterruptedSurgery):
        surgery.apply(run, made, progress=stop)
    assert ranks(2, *words, late=True) == [(0, "", "")]
    assert surgeon("recover", "-C", root)[0] == 0
    path = root / ".ckptsurgeon/receipts/0001/receipt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "launch": "4711-0-0"}))
    done = snapshot(root, own=True)
    assert ranks(2, *words, late=True) == [(0, "", "")]
    assert ranks(2, *words, "--resume", late=True) == [(0, "", "")]
    shutil.rmtree(root / "global_step6")
    assert ranks(2, *words, late=True) == [(0, "", "")]
    [(code, _, error)] = ranks(2, *words, late=True, step=1)
    assert code == 2 and "step 6" in error, "another launch"
    found = snapshot(root, own=True)
    assert found == {name: what for name, what in done.items() if "global_step6" not in name}


READ = (
    ("verify", "--level", 3),
    ("verify", "--level", 4),
    ("verify", "8", "--after", 6),
    ("doctor", "--vitals", "--against", 6),
    ("diff", "6", "8", "--tensors"),
)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("words", READ, ids=lambda words: "-".join(map(str, words)))
@pytest.mark.long
def test_the_tasks_of_an_srun_share_what_is_read(
    trained: Trained, tmp_path: Path, words: tuple[object, ...]
) -> None:
    """The last one says what one process says; the others nothing, and no file is left."""
    root = trained(zero=1, dtype="bf16", ranks=2)
    folder = tmp_path / "empty"
    folder.mkdir()
    for more in ((), ("--json",)):
        alone = surgeon(*words, *more, "-C", root)
        *helpers, last = ranks(3, *words, *more, "-C", root, "--ranks-from-env", cwd=folder)
        assert last[:2] == alone[:2], last
        assert helpers == [(0, "", "")] * 2
    assert " workers on " in last[2] or "--json" in more
    assert [*folder.iterdir()] == []


@pytest.mark.long
def test_a_damaged_shard_is_found_by_whoever_reads_it(trained: Trained, tmp_path: Path) -> None:
    root = trained(zero=1, dtype="bf16", ranks=2)
    for shard in sorted((root / "global_step8").glob("*optim*")):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    for level in (3, 4):
        words = ("verify", "--level", level, "-C", root)
        alone = surgeon(*words)
        assert alone[0] == 4 and "has CRC" in alone[1]
        *helpers, last = ranks(3, *words, "--ranks-from-env", cwd=tmp_path)
        assert last[:2] == alone[:2] and helpers == [(0, "", "")] * 2


@pytest.mark.long
def test_an_export_by_the_tasks_of_an_srun_is_that_of_one_process(
    trained: Trained, tmp_path: Path
) -> None:
    root = trained(zero=3, dtype="fp32", ranks=2)
    words = ("export", 8, "--shard-size", "0.0001", "-C", root)
    assert surgeon(*words, "-o", tmp_path / "a")[0] == 0
    *helpers, last = ranks(3, *words, "-o", tmp_path / "b", "--ranks-from-env")
    assert last[0] == 0 and helpers == [(0, "", "")] * 2, (last, helpers)
    assert differs(snapshot(tmp_path / "b"), snapshot(tmp_path / "a"), times=False) is None
    assert {path.name for path in tmp_path.iterdir()} >= {"a", "b"}
    assert not [*tmp_path.glob("b?*")]
    words = (*words, "-o", tmp_path / "b", "--ranks-from-env")
    assert ranks(3, *words, late=True) == [(0, "", "")]
    done = snapshot(tmp_path / "b")
    *helpers, last = ranks(3, *words, step=1)
    assert last[0] == 2 and "b already exists" in last[2] and helpers == [(0, "", "")] * 2
    shutil.rmtree(root / "global_step8")
    assert ranks(3, *words, late=True) == [(0, "", "")], "the trainer deletes old steps meanwhile"
    assert snapshot(tmp_path / "b") == done


@pytest.mark.long
def test_ranks_are_refused_elsewhere_and_beside_a_scheduler() -> None:
    words = ("average", "6", "8", "--ranks-from-env")
    code, _, error = surgeon(*words)
    assert code == 2 and "--ranks-from-env is for the tasks of an srun" in error
    code, _, error = surgeon(*words, "--on", "host:8786")
    assert code == 2 and "--on and --ranks-from-env exclude each other" in error
    assert "average 6 8 --ranks-from-env    without it" in error
    for words, needs in ((("doctor",), "--vitals"), (("diff", "6", "8"), "--tensors")):
        code, _, error = surgeon(*words, "--ranks-from-env")
        assert code == 2 and f"--ranks-from-env belongs to {needs}" in error


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
