"""`recover --give-up`: offered where a file is in the way, asked, told, and refused elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsurgeon import Hyperparameters, Recipe, Rollback, Run, surgery
from ckptsurgeon.errors import InterruptedSurgery
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.stable.make import HERE, unpack
from tests.support.snapshot import snapshot

RUN = HERE / "1.0.0/before.tar.gz"


def test_a_surgery_that_cannot_be_finished_is_given_up(surgeon: Surgeon, tmp_path: Path) -> None:
    """A trainer has overwritten a shard of it since: the others are as before, that one stays."""
    root = unpack(RUN, tmp_path / "run")
    before = snapshot(root)
    run = Run.open(root)
    shard = root / "checkpoint-6/scheduler.pt"
    name, bytes_before = str(shard.relative_to(root)), shard.read_bytes()

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "editing":
            raise KeyboardInterrupt

    with pytest.raises(InterruptedSurgery):
        surgery.apply(run, surgery.plan(run, Recipe(Hyperparameters(lr=5e-4))), progress=stop)
    early = surgeon("recover", "--give-up", "--yes", "-C", root)
    assert (early.exit_code, early.stdout) == (5, "")
    assert "nothing is in the way of" in early.stderr
    shard.write_bytes(bytes_before[:-100])
    theirs = snapshot(root)
    refused = surgeon("recover", "-C", root)
    assert refused.exit_code == 5
    assert f"ckptsurgeon -C {root} recover --give-up " in refused.stderr
    shown = surgeon("recover", "--give-up", "-n", "-C", root)
    assert shown.exit_code == 0
    assert shown.stdout.startswith("would give up set lr=0.0005\n")
    assert f"{name}, which is not the surgery's any more" in " ".join(shown.stdout.split())
    asked = surgeon("recover", "--give-up", "-C", root)
    assert asked.exit_code == 5
    assert "--yes was not given" in asked.stderr
    assert snapshot(root) == theirs
    told = json.loads(surgeon("recover", "--give-up", "--yes", "--json", "-C", root).stdout)
    assert (told["outcome"], told["receipt"], told["left"]) == ("given up", None, {name: ""})
    assert snapshot(root) == {**before, name: theirs[name]}
    assert f"left: {name}" in " ".join(surgeon("log", "-C", root).stdout.split())
    assert (
        json.loads(surgeon("log", "--json", "-C", root).stdout)["given_up"][0]["surgery"] == "0001"
    )
    again = surgeon("recover", "--give-up", "--yes", "-C", root)
    assert (again.exit_code, again.stdout.split(":")[0]) == (0, "nothing to recover")
    shard.write_bytes(bytes_before)
    assert "receipt 0002" in surgeon("set-lr", "4e-4", "--yes", "-C", root).stdout


def test_prune_lists_what_a_surgery_that_was_given_up_keeps(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    surgeon("set", "beta1=0.8", "--no-tb-note", "--yes", "-C", root)
    run = Run.open(root)

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "editing" and done == total:
            raise KeyboardInterrupt

    planned = surgery.plan(run, Recipe(Rollback(to=4), Hyperparameters(lr=5e-4)))
    with pytest.raises(InterruptedSurgery):
        surgery.apply(run, planned, progress=stop)
    (root / "latest").write_bytes(b"of a trainer")
    next((root / "global_step4").glob("*optim*")).write_bytes(b"of a trainer")
    told = json.loads(surgeon("recover", "--give-up", "--yes", "--json", "-C", root).stdout)
    kept = told["left"]["latest"]
    assert (root / kept).read_text() == "global_step8"
    assert kept in surgeon("log", "-C", root).stdout
    listed = surgeon("prune", "--dry-run", "-C", root).stdout
    assert "0002" in listed and "1 file   given up: " in listed
    assert "nothing to prune" in surgeon("prune", "--keep", 1, "--yes", "-C", root).stdout
    assert surgeon("prune", "--keep", 0, "--yes", "-C", root).exit_code == 0
    assert not (root / kept).exists()
    assert kept not in surgeon("log", "-C", root).stdout
    assert json.loads(surgeon("log", "--json", "-C", root).stdout)["given_up"][0]["pruned"] is True
    assert surgeon("undo", "--yes", "-C", root).exit_code == 0
