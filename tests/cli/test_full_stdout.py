"""What any command says where stdout or stderr takes no text: it is done and told, or not done."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsurgeon.cli.commands import commands
from tests.support.launch import REPO
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

WORDS = {
    "status": "", "show": "", "log": "", "verify": "", "doctor": "", "diff": "4 8", "advise": "",
    "report": "-o run.svg", "plan": "recipe.yaml -o plan.json", "apply": "recipe.yaml --yes",
    "undo": "--yes", "redo": "--yes", "recover": "", "rollback": "4 --yes --json",
    "repair-latest": "--yes", "set-lr": "5e-4 --yes", "set": "beta2=0.9 --yes --json",
    "cooldown": "4 --to 0 --yes --json", "reset": "moments --yes --json",
    "skip": "9-12 --yes --json", "swap-optimizer": "adamw --yes", "average": "4 8 --yes",
    "graft": "--from 4 --params x --yes", "transplant": "--from run --yes",
    "clip-moments": "--yes", "scale": "--params x --by 2 --yes", "precision": "bf16 --yes",
    "sync-replicas": "--yes", "truncate-tb-events": "--after 4 --yes",
    "rename-tb-events": "a=b --yes", "truncate-logs": "--after 4 --yes --json",
    "rename-logs": "loss=train/loss --yes --json", "ready": "", "relaunch": "--json",
    "watch": "--once", "fork": "branch --copy --yes --json", "export": "-o weights --yes",
    "draft-format": "", "check-format": "torch:checkpoint-{step}/optimizer.pt",
    "check-optimizer": "torch.optim.SGD", "compact": "--yes", "shrink": "--yes",
    "prune": "--keep 0 --yes", "unlock": "--yes",
}  # fmt: skip
"""Each command as it may be typed; those that edit with --json, as the plan is not shown then."""
QUICK = ("status", "plan", "set-lr", "rollback", "relaunch")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in commands()]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a run that was edited and can be started."""
    root = make_run(tmp_path / "here" / "run", (4, 8, 12))
    rows = [{"step": step, "loss": 2.0} for step in range(1, 13)]
    (root / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "ckptsurgeon.yaml").write_text("relaunch: {command: [echo, trained]}\n")
    (root.parent / "recipe.yaml").write_text("set: {lr: 2e-4}\n")
    assert typed(root.parent, "rollback 8 --yes -C run", "").returncode == 0
    return root.parent


def typed(folder: Path, words: str, streams: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m ckptsurgeon {words} {streams}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def held(folder: Path) -> dict[str, tuple[str, str]]:
    """A plan names its run, which is elsewhere in each copy."""
    return {
        name: (kind, "" if name == "plan.json" else content)
        for name, (kind, content, _) in snapshot(folder).items()
    }


def test_every_command_is_typed() -> None:
    assert WORDS.keys() == commands().keys()


@pytest.mark.parametrize("name", EACH)
def test_it_is_done_and_told_or_not_done(here: Path, name: str) -> None:
    words, before = f"{name} {WORDS[name]} -C run", held(here)
    copies = {how: here.parent / how for how in ("usual", "full", "both", "deaf")}
    for copy in copies.values():
        shutil.copytree(here, copy, symlinks=True)
    usual = typed(copies["usual"], words, "")
    full = typed(copies["full"], words, "> /dev/full")
    assert "Traceback" not in full.stderr and "Exception ignored" not in full.stderr
    if full.returncode == usual.returncode and held(copies["full"]) == held(copies["usual"]):
        assert full.stderr or not usual.stdout, "done, and nobody is told"
        assert "exactly as it was" not in full.stderr or usual.returncode
    else:
        lost = re.search("(the answer|what would be done) can't be (written|shown)", full.stderr)
        assert full.returncode == 1 and lost, (usual, full)
        assert "the run is exactly as it was" in full.stderr
        assert held(copies["full"]) == before
    both = typed(copies["both"], words, "> /dev/full 2>&1")
    assert (both.returncode, held(copies["both"])) == (full.returncode, held(copies["full"]))
    deaf = typed(copies["deaf"], words, "2> /dev/full")
    assert (deaf.returncode, held(copies["deaf"])) == (usual.returncode, held(copies["usual"]))


def test_a_trainer_goes_on_though_what_it_prints_is_lost(here: Path) -> None:
    command = ["bash", "-c", "for i in 1 2 3; do echo $i; done; touch trained"]
    (here / "run" / "ckptsurgeon.yaml").write_text(json.dumps({"relaunch": {"command": command}}))
    done = typed(here, "relaunch -C run", "> /dev/full")
    assert done.returncode == 0 and (here / "trained").exists(), done.stderr
    assert done.stderr.count("what the trainer prints is lost from here on: No space left") == 1
