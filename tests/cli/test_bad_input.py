"""The mistakes that people make: three lines, an exit code, the run byte for byte as it was."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptsurgeon.cli import app
from tests.conftest import Trained
from tests.support.launch import REPO
from tests.support.snapshot import snapshot


def refuse(root: Path, *arguments: str, code: int) -> str:
    """Run a command that must be refused; returns its stderr, and proves that nothing changed."""
    before = snapshot(root)
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", *arguments, "-C", str(root), "--yes"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    lines = [line.split(":")[0] for line in done.stderr.splitlines() if not line.startswith(" ")]
    assert lines == ["error", "untouched", "next"], done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert snapshot(root) == before
    assert not (root / ".ckptsurgeon").exists()
    return done.stderr


def test_a_step_that_is_not_saved_names_the_nearest_ones(trained: Trained) -> None:
    said = refuse(trained(), "rollback", "--to", "5", code=2)
    assert "step 5 is not saved" in said
    assert "step 4 is saved" in said
    assert "step 6 is saved" in said


def test_an_incomplete_checkpoint_names_its_missing_shards(trained: Trained) -> None:
    root = trained(ranks=2)
    (root / "global_step6" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    said = refuse(root, "rollback", "--to", "6", code=1)
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in said
    assert "rollback --to 4    the newest complete one before it" in said


@pytest.mark.parametrize("text", ["global_step7", "", "../../etc/passwd", "global_step8\0"])
@pytest.mark.long
def test_a_latest_that_names_nothing_is_repaired_first(trained: Trained, text: str) -> None:
    root = trained()
    (root / "latest").write_text(text)
    said = refuse(root, "set-lr", "1e-3", code=1)
    assert " repair-latest" in said


@pytest.mark.long
def test_an_unknown_recipe_key_gets_the_nearest_one(trained: Trained, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("set: {learning_rate: 3e-5, beta_2: 0.95}\n")
    said = refuse(trained(), "apply", str(recipe), code=2)
    assert "unknown key" in said
    recipe.write_text("set: {beta_2: 0.95}\n")
    root = tmp_path / "run"
    said = refuse(root, "apply", str(recipe), code=2)
    assert "did you mean `set.beta2`?" in said


def test_an_lr_below_min_lr_is_refused_with_the_command_that_works(trained: Trained) -> None:
    said = refuse(trained(), "set-lr", "1e-5", code=2)
    assert "below min_lr 0.0001" in said
    assert " set-lr 1e-05 --min-lr 1e-06" in said


@pytest.mark.long
def test_an_lr_in_yaml_is_a_number_with_and_without_a_point(
    trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    for text in ("3e-4", "3.0e-4", "0.0003"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"set: {{lr: {text}, warmup: 0, decay_style: constant}}\n")
        done = subprocess.run(
            [sys.executable, "-m", "ckptsurgeon", "plan", str(recipe), "-C", str(root), "--json"],
            cwd=REPO,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["promise"]["lr"] == 3e-4


@pytest.mark.long
def test_a_live_trainer_is_refused_and_the_plan_is_shown(trained: Trained) -> None:
    root = trained()
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    record = {"host": socket.gethostname(), "pid": os.getpid(), "start_time": int(stat[19])}
    (root / "trainer.pid").write_text(json.dumps(record))
    said = refuse(root, "rollback", "--to", "4", code=1)
    assert f"process {os.getpid()} is running" in said

    def look(*arguments: str, code: int = 0) -> str:
        before = snapshot(root)
        result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, [*arguments, "-C", str(root)])
        assert result.exit_code == code, result.output
        assert snapshot(root) == before
        return result.stdout

    for shown in (look("rollback", "--to", "4", "-n"), look("set-lr", "1e-4", "-n")):
        assert "step 5 will use" in shown or "step 9 will use" in shown
        assert "note  a trainer is alive in this run: trainer.pid: process" in shown
        assert "apply refuses until it is gone" in " ".join(shown.split())
    recipe = root.parent / "recipe.yaml"
    recipe.write_text("set: {beta1: 0.8}\n")
    assert "a trainer is alive" in look("plan", str(recipe), "-o", str(root.parent / "plan.json"))
    assert "a trainer is alive" in look("apply", str(root.parent / "plan.json"), "-n")
    refuse(root, "apply", str(root.parent / "plan.json"), code=1)
    for command in ("status", "doctor"):
        assert f"process {os.getpid()} is running" in look(command)
        assert look(command, "--json").count(f"process {os.getpid()} is running") == 1


def test_a_writer_of_event_files_that_is_alive_is_refused(trained: Trained) -> None:
    root = trained()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as writer:
        name = f"events.out.tfevents.{2**31 - 1}.{socket.gethostname()}.{writer.pid}.0"
        (root / "tensorboard" / name).write_bytes(b"")
        try:
            said = refuse(root, "rollback", "--to", "4", code=1)
        finally:
            writer.kill()
    assert f"process {writer.pid}, is running" in said


def test_shards_that_disagree_are_refused_with_both_values(trained: Trained) -> None:
    import torch

    root = trained(ranks=2)
    shard = root / "global_step8" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(shard, weights_only=False)
    base = state["optimizer_state_dict"]["base_optimizer_state"]
    base["param_groups"][0]["betas"] = (0.5, 0.5)
    torch.save(state, shard)
    said = refuse(root, "set", "eps=1e-6", code=1)
    assert "shards disagree on betas" in said
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in said


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "no training run" in refuse(tmp_path, "set-lr", "1e-3", code=2)


def test_an_event_file_that_somebody_writes_is_refused(trained: Trained) -> None:
    root = trained()
    log = next((root / "tensorboard").iterdir())
    with log.open("ab"):
        said = refuse(root, "rollback", "--to", "4", code=1)
    assert "somebody has it open for writing" in said


def test_an_event_file_of_another_host_must_be_quiet_first(trained: Trained) -> None:
    root = trained()
    log = next((root / "tensorboard").iterdir())
    away = log.rename(log.with_name("events.out.tfevents.1700000000.node-17.55.0"))
    os.utime(away)
    said = refuse(root, "rollback", "--to", "4", code=1)
    assert "written from node-17" in said
    quiet = away.stat().st_mtime - 300
    os.utime(away, (quiet, quiet))
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", "set", "beta1=0.8", "-C", str(root), "--yes"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
