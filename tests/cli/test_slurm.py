"""The sbatch script starts a torchrun on each node, saves when preempted, requeues, and quotes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsurgeon import Run, look
from ckptsurgeon.errors import UsageError
from ckptsurgeon.launch.relaunch import compare, job
from ckptsurgeon.launch.slurm import Job, script
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.support.launch import REPO
from tests.support.trained_run import losses

HOSTILE = 'it\'s a $(touch pwned) `touch pwned` "run"; #'
SCONTROL = """#!/bin/bash
if [[ "$1 $2" == "show hostnames" && "$3" == "node[1-2]" ]]; then printf '127.0.0.1\\nnode2\\n'
elif [[ "$1" == requeue ]]; then echo "$2" > "$REQUEUED"
else exit 9; fi
"""
SRUN = """#!/bin/bash
# Each "node" is a process of this machine; only the first one gets stdin.
while [[ "$1" == --* ]]; do
  case "$1" in --nodes=*) nodes="${1#*=}" ;; esac
  shift
done
for ((i = 1; i < nodes; i++)); do SLURM_NODEID=$i "$@" < /dev/null & others+=($!); done
SLURM_NODEID=0 "$@"
status=$?
for pid in "${others[@]}"; do wait "$pid" || status=$?; done
exit $status
"""


def cluster(folder: Path) -> dict[str, str]:
    """An allocation of two nodes, by commands of SLURM's names."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "REQUEUED": str(folder / "requeued"),
    }


@pytest.mark.slow
def test_two_nodes_train_keep_the_promise_save_at_the_signal_and_are_requeued(
    trained: Trained, tmp_path: Path, surgeon: Surgeon
) -> None:
    root = trained(ranks=2).rename(tmp_path / HOSTILE)
    promise = look.inspect(Run.open(root)).promise
    file = tmp_path / "job.sbatch"
    written = surgeon(
        "relaunch", "--slurm", "--nodes", 2, "--sbatch", "partition=gpu", "-o", file, "-C", root,
        "--", "train_iters=100000", "save_interval=100000", f"data={tmp_path}/x y/../data",
    )  # fmt: skip
    assert (written.exit_code, written.stdout) == (0, f"wrote {file}\n  submit   sbatch {file}\n")
    (tmp_path / "x y").mkdir()
    config = (root / "train.yaml").read_text()
    data = next(line.split(": ", 1)[1] for line in config.splitlines() if line.startswith("data:"))
    for ending in (".bin", ".idx"):
        shutil.copy(data + ending, tmp_path / f"data{ending}")

    process = subprocess.Popen(
        ["bash", str(file)],
        stdout=subprocess.PIPE,
        env=cluster(tmp_path),
        cwd=tmp_path,
        text=True,
    )
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if line.startswith(" iteration       10/"):
            process.send_signal(signal.SIGUSR1)
            break
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 0, "".join(told) + rest
    assert compare(promise, told[0]) == []
    last = max(losses("".join(told) + rest))
    assert (root / "latest").read_text() == f"global_step{last}"
    assert len(list((root / f"global_step{last}").glob("*optim_states.pt"))) == 2
    assert (tmp_path / "requeued").read_text().strip() == str(os.getpid())
    assert not (root / "kill-switch").exists()
    assert not list(tmp_path.rglob("pwned")) and not (Path.cwd() / "pwned").exists()


def test_a_broken_promise_ends_the_job_with_4(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    line = '{"step": 9, "lr": 1.0}'
    # In one write: both nodes share stdout, and an unbuffered print writes its newline by itself.
    code = f"import os; os.write(1, {f'{line}{chr(10)}'.encode()!r})"
    own = {"command": [sys.executable, "-c", code], "kill_switch": "stop here"}
    (root / "ckptsurgeon.yaml").write_text(json.dumps({"relaunch": own}))
    text = script(job(Run.open(root), None, (), 2, ()))
    assert f"stop='{root}/stop here'" in text
    (root / "stop here").write_text("a person wants it")
    done = subprocess.run(
        ["bash", "-c", text], env=cluster(tmp_path), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 4 and "lr: promised" in done.stderr
    assert not (tmp_path / "requeued").exists()
    assert (root / "stop here").read_text() == "a person wants it"


@pytest.mark.long
def test_a_job_does_not_load_a_torn_save(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    steps = Run.open(root).steps()
    code = "import sys; sys.exit(9)"
    (root / "ckptsurgeon.yaml").write_text(
        json.dumps({"relaunch": {"command": [sys.executable, "-c", code]}})
    )
    text = script(job(Run.open(root), None, (), 2, ()))

    def ends() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", text], env=cluster(tmp_path), capture_output=True, text=True, timeout=600
        )

    for step in steps[:0:-1]:
        shard = max(Run.open(root).format.files(root, step), key=lambda path: path.stat().st_size)
        os.truncate(shard, 100)
    done = ends()
    assert done.returncode == 9 and f"ready: step {steps[0]}," in done.stderr, done.stderr
    shutil.rmtree(tmp_path / "bin")
    for path in Run.open(root).format.files(root, steps[0]):
        os.truncate(path, path.stat().st_size // 2)
    done = ends()
    assert done.returncode == 4 and done.stderr.startswith("not ready:"), done.stderr


def test_a_job_whose_trainer_hung_is_requeued_so_many_times(tmp_path: Path) -> None:
    """torchrun makes 1 of the trainer's 75; the file that the watchdog leaves says what it was."""
    run = tmp_path / HOSTILE
    run.mkdir()
    hung = run / "hung"
    environment, requeued = cluster(tmp_path), tmp_path / "requeued"

    def end(code: int, left: Path | str = "") -> tuple[int, bool, str]:
        """How a job ends whose trainer leaves this exit code and this file."""
        act = '[[ -z "$2" ]] || touch -- "$2"; exit "$1"'
        surgeon = ["bash", "-c", act, "x", str(code), str(left)]
        wanted = Job("n", 2, tmp_path, surgeon, [], run / "stop", (), hung, 2)
        done = subprocess.run(
            ["bash", "-c", script(wanted)], env=environment, capture_output=True, text=True,
            timeout=600, cwd=run,
        )  # fmt: skip
        again = requeued.exists()
        requeued.unlink(missing_ok=True)
        return done.returncode, again, done.stderr

    assert end(1) == (1, False, "")
    assert end(1, hung) == (1, True, "the trainer hung; requeue 1 of 2\n")
    assert end(1, hung) == (1, True, "the trainer hung; requeue 2 of 2\n")
    assert end(1, hung)[:2] == (1, False)  # and the count begins anew with the next job
    assert end(75, hung)[:2] == (75, True)
    hung.touch()  # of an earlier start
    assert end(1) == (1, False, "")
    assert end(0, hung)[:2] == (0, False)
    assert sorted(path.name for path in run.iterdir()) == ["hung"]


def test_the_shell_and_shellcheck_find_nothing_wrong(trained: Trained, tmp_path: Path) -> None:
    root = trained(ranks=2).rename(tmp_path / HOSTILE)
    text = script(job(Run.open(root), None, ["--x", "$HOME", "a'b"], 2, ["gres=gpu:8"]))
    (root / "ckptsurgeon.yaml").write_text('relaunch: {command: [torchrun, "a b"]}')
    plain = script(job(Run.open(root), None, (), 2, ()))
    assert "#SBATCH --gres=gpu:8" in text and "trap" in text and "trap" not in plain
    for one in (text, plain):
        subprocess.run(["bash", "-n"], input=one, text=True, check=True, timeout=600)
        if shutil.which("shellcheck"):
            checked = subprocess.run(
                ["shellcheck", "--severity=style", "--exclude=SC2016,SC2089,SC2090", "-"],
                input=one, text=True, capture_output=True, timeout=600,
            )  # fmt: skip
            assert checked.stdout == ""


@pytest.mark.parametrize("option", ["a b=c", "time=1\n2", 'x="y"', "=3", "-p=gpu", "PATH=x", ""])
def test_no_other_line_gets_into_the_head(trained: Trained, option: str) -> None:
    wanted = job(Run.open(trained()), None, (), 1, [option])
    with pytest.raises(UsageError, match="is not a plain sbatch option"):
        script(wanted)


def test_nodes_that_can_not_share_the_ranks_are_refused(trained: Trained) -> None:
    with pytest.raises(UsageError, match="saved by 2 ranks, which 3 nodes can't share") as caught:
        job(Run.open(trained(ranks=2)), None, (), 3, ())
    assert caught.value.next == ("ckptsurgeon relaunch --slurm --nodes 1",)
