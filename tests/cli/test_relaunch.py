"""relaunch: the trainer's first line against the promise, with the bundled trainer and another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.support.launch import REPO


@pytest.mark.long
def test_a_rollback_relaunches_the_bundled_trainer(trained: Trained) -> None:
    root = trained()
    words = "rollback --to 6 --set beta1=0.8 --yes --relaunch"
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", *words.split(), "-C", str(root)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _, _, after = done.stdout.partition(" relaunch\n")
    first = json.loads(after.splitlines()[0])
    assert (first["step"], first["betas"][0]) == (7, 0.8)
    assert (root / "latest").read_text() == "global_step8"
    said = "verified: step 8 goes on from step 6: Adam's counter, data, lr, parameters, moments"
    assert said in done.stderr


COLD = """
import pathlib, shutil, sys, torch
root = pathlib.Path({root!r})
shutil.copytree(root / "global_step8", root / "global_step10")
for path in (root / "global_step10").glob("*optim_states.pt"):
    held = torch.load(path, weights_only=False)
    for state in held["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["exp_avg"] *= 0.1
        state["exp_avg_sq"] *= 0.01
    torch.save(held, path)
print(sys.argv[1])
"""


def test_a_later_step_that_was_there_before_is_not_the_trainers(
    surgeon: Surgeon, trained: Trained
) -> None:
    """Of an abandoned branch: the trainer went on from step 6 and saved nothing."""
    root = trained()
    for file in (root / "global_step8").glob("*optim_states.pt"):
        file.write_bytes((root / "global_step2" / file.name).read_bytes())
    (root / "latest").write_text("global_step6")
    (root / "latest_checkpointed_iteration.txt").write_text("6")
    promise = json.loads(surgeon("show", 6, "--json", "-C", root).stdout)["promise"]
    echo = "import sys; print(sys.argv[1])"
    _names_its_own(root, sys.executable, "-c", echo, json.dumps(promise))
    told = surgeon("relaunch", "-C", root)
    assert told.exit_code == 0 and "goes on" not in told.stderr, told.stderr
    assert surgeon("verify", 8, "--after", 6, "-C", root).exit_code == 4


@pytest.mark.long
def test_a_trainer_that_began_with_a_cold_optimizer_is_exit_4(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    promise = json.loads(surgeon("show", 8, "--json", "-C", root).stdout)["promise"]
    line = json.dumps(promise)
    _names_its_own(root, sys.executable, "-c", COLD.format(root=str(root)), line)
    told = surgeon("relaunch", "-C", root)
    assert told.exit_code == 4, told.stderr
    assert "mismatch: step 10 does not go on from step 8\n" in told.stderr
    assert "exp_avg_sq fell faster than beta2 allows" in told.stderr
    assert f"next: ckptsurgeon -C {root} verify 10 --after 8" in told.stderr


def _names_its_own(root: Path, *command: str) -> None:
    (root / "ckptsurgeon.yaml").write_text(json.dumps({"relaunch": {"command": list(command)}}))


def test_a_trainer_that_breaks_the_promise_is_exit_4(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    _names_its_own(root, sys.executable, "-c", 'print(\'{"step": 9, "lr": 1.0}\')')
    result = surgeon("relaunch", "-C", root)
    assert result.exit_code == 4
    assert "lr: promised" in result.stderr
    assert f"next: ckptsurgeon -C {root} show    which place of each value wins" in result.stderr
    assert "surgery" not in result.stderr
    assert surgeon("set", "beta1=0.8", "--yes", "-C", root).exit_code == 0
    result = surgeon("relaunch", "-C", root)
    assert result.exit_code == 4
    assert f"next: ckptsurgeon -C {root} undo" in result.stderr


def test_a_trainer_that_dies_early_leaves_no_surgery_that_stands(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    _names_its_own(root, sys.executable, "-c", "raise SystemExit(3)")
    told = surgeon("relaunch", "--check", "-C", root)
    assert told.exit_code == 1
    assert "untouched: the trainer has trained no step\n" in told.stderr
    surgeon("set", "beta1=0.8", "--yes", "-C", root)
    told = surgeon("relaunch", "--check", "-C", root)
    assert "untouched: the surgery stands; the trainer has trained no step\n" in told.stderr


def test_a_check_says_its_verdict(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    promise = json.loads(surgeon("show", 8, "--json", "-C", root).stdout)["promise"]
    _names_its_own(
        root, sys.executable, "-c", "import sys; print(sys.argv[1])", json.dumps(promise)
    )
    told = surgeon("relaunch", "--check", "-C", root)
    assert (told.exit_code, told.stdout) == (0, f"{json.dumps(promise)}\n")
    assert "verified: the trainer matches the promise of step 9\n" in told.stderr
    assert "verified:" not in surgeon("relaunch", "--check", "-q", "-C", root).stderr


@pytest.mark.parametrize(("name", "more"), [("KILL", "where memory runs out"), ("SEGV", "")])
def test_a_signal_that_ended_the_trainer_is_named(
    surgeon: Surgeon, trained: Trained, name: str, more: str
) -> None:
    root = trained()
    command = ["bash", "-c", f"kill -{name} $$"]
    (root / "ckptsurgeon.yaml").write_text(json.dumps({"relaunch": {"command": command}}))
    result = surgeon("relaunch", "-y", "-C", root)
    assert result.exit_code == 128 + getattr(signal, f"SIG{name}")
    said = f"the trainer was ended by SIG{name}"
    assert said in result.stderr and more in result.stderr
    assert f"ckptsurgeon -C {root} relaunch goes on from" in result.stderr


def test_the_status_of_the_trainer_is_the_exit_code(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    shown = json.loads(surgeon("show", 8, "--json", "-C", root).stdout)
    line = json.dumps(shown["promise"])
    code = "import sys; print(sys.argv[1]); print(sys.argv[2:]); sys.exit(7)"
    _names_its_own(root, sys.executable, "-c", code, line)
    result = surgeon("relaunch", "-C", root, "--", "--more", "a b")
    assert result.exit_code == 7
    assert result.stdout.splitlines() == [line, "['--more', 'a b']"]
    told = surgeon("relaunch", "--json", "-C", root)
    assert json.loads(told.stdout)["status"] == 7
    assert line in told.stderr


def test_the_command_is_shown_as_a_shell_would_take_it(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    _names_its_own(root, "train me", "--lr", "$LR")
    result = surgeon("relaunch", "--dry-run", "-C", root)
    assert (result.exit_code, result.stdout) == (0, "'train me' --lr '$LR'\n")


def test_a_command_that_is_not_there_is_an_error(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    _names_its_own(root, "/no/such/trainer")
    result = surgeon("relaunch", "-C", root)
    assert result.exit_code == 1
    assert "/no/such/trainer" in result.stderr
