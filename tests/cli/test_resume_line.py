"""The line of a surgery that says how the run goes on, and how its trainer is checked."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run
from tests.cli.conftest import Surgeon
from tests.support import described_runs, more_described_runs
from tests.support.event_logs import write_log
from tests.support.lightning_files import lightning
from tests.support.tiny_run import make_run


def resume(stdout: str, row: str = "resume") -> str:
    (line,) = (line for line in stdout.splitlines() if line.startswith(f"  {row} "))
    return line


def test_an_undo_takes_the_command_back_too(surgeon: Surgeon, tmp_path: Path) -> None:
    """What a note told the user to give, the trainer is not to get after the undo."""
    root = make_run(tmp_path / "run", (4, 8))
    done = surgeon("rollback", "--to", "4", "--set", "beta2=0.9", "--yes", "-C", root)
    assert "restart its trainer with the same command" in resume(done.stdout)
    for command, id in (("undo", "0001"), ("redo", "0002")):
        line = resume(surgeon(command, "--yes", "-C", root).stdout)
        assert f"restart its trainer with the command that you used before {id}" in line


def test_a_trainer_that_is_told_its_step_is_told_the_new_one(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    root = described_runs.nanochat(tmp_path / "d2")
    done = surgeon("rollback", "--to", "4", "--yes", "-C", root)
    assert "with the same command and --resume-from-step 4" in resume(done.stdout)


def test_a_trainer_that_is_told_a_folder_is_told_that_of_the_new_step(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    root = more_described_runs.sd_scripts(tmp_path / "a run", only_steps=True)
    first, *_ = Run.open(root).steps()
    done = surgeon("rollback", "--to", first, "--yes", "-C", root)
    (folder,) = root.glob(f"*-step*{first}-state")
    assert f"with the same command and --resume '{folder}'" in resume(done.stdout)


def test_a_trainer_that_prints_no_rate_is_read_by_what_it_logs(
    surgeon: Surgeon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "my run" / "checkpoints"
    for step in (2, 4):
        lightning(root, step, torch.zeros(1))
    write_log(root.parent / "logs" / "version_0", [2.0] * 4, first=0, tag="train_loss")
    monkeypatch.chdir(tmp_path)
    line = resume(surgeon("set", "lr=4e-4", "--yes", "-C", root).stdout, "check")
    assert f"ckptsurgeon -C '{root}' verify --tb 'my run/logs'    compares what it logs" in line
    monkeypatch.chdir(root)
    line = resume(surgeon("set", "lr=5e-4", "--yes").stdout, "check")
    found = re.search(r"ckptsurgeon (verify --tb .*?)    compares what it logs", line)
    assert found and found[1] == "verify --tb ../logs"
    new = root.parent / "logs" / "version_1"
    write_log(new, [5e-4] * 2, first=4, tag="lr-AdamW", wall=time.time())
    assert surgeon(*shlex.split(found[1])).exit_code == 0


def test_without_event_files_its_output_is_asked_for(surgeon: Surgeon, tmp_path: Path) -> None:
    lightning(tmp_path / "checkpoints", 2, torch.zeros(1))
    done = surgeon("set", "lr=5e-4", "--yes", "-C", tmp_path / "checkpoints")
    assert "verify --log FILE    compares what it prints" in resume(done.stdout, "check")


def test_ms_swift_is_told_the_step_that_it_begins_from(surgeon: Surgeon, tmp_path: Path) -> None:
    """Without it the same command begins anew; other trainers on transformers find it."""
    for saved in ("", "{broken", '{"model": "llama"}', '{"swift_version": "4.6.0"}'):
        root = make_run(tmp_path / f"run {len(saved)}", (2, 4))
        for step in (2, 4) if saved else ():
            (root / f"checkpoint-{step}" / "args.json").write_text(saved)
        line = resume(surgeon("rollback", "--to", "2", "--yes", "-C", root).stdout)
        named = f"the same command and --resume_from_checkpoint '{root}/checkpoint-2'"
        assert (named in line) == ("swift" in saved), line
