"""Surgery from the command line on runs of the real trainer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Surgeon, on_terminal
from tests.conftest import Trained
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

RECIPE = "why: spike\nrollback: {to: 4}\nset: {lr: 5e-4}\n"


@pytest.mark.parametrize(
    ("pair", "used"),
    [("beta2=0.7", "beta 0.9, 0.7"), ("eps=1e-7", "eps 1e-07"), ("seed=7", "seed 7")],
)
def test_what_was_set_is_what_is_said_to_be_verified(
    surgeon: Surgeon, trained: Trained, pair: str, used: str
) -> None:
    done = surgeon("set", pair, "--yes", "-C", trained())
    assert f"done: receipt 0001; verified: step 9 uses {used}\n" in done.stdout


def test_a_rollback_is_done_shown_and_undone(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    before = snapshot(root)
    result = surgeon(
        "rollback", "--to", 4, "--set", "lr=5e-4", "--why", "spike", "--yes", "-C", root
    )
    assert (result.exit_code, result.stdout.splitlines()[0]) == (
        0,
        "run   rollback 8 → 4, set lr=0.0005",
    )
    assert "  checkpoints  > 6 8 " in result.stdout
    assert (
        "  step 5 will use   lr 5.0" in result.stdout
        or "  step 5 will use   lr 4.9" in result.stdout
    )
    assert "done: receipt 0001; verified: step 5 uses lr " in result.stdout
    assert result.stderr == ""

    told = surgeon("status", "-C", root).stdout
    assert "run   at step 4   deepspeed · zero 1 · dp 1" in told
    assert "  0001  rollback 8 → 4" in told
    assert "why: spike" in surgeon("log", "-C", root).stdout

    shown = surgeon("undo", "--dry-run", "-C", root).stdout
    assert "  checkpoints  < 6 8 " in shown
    assert "~ global_step4 → global_step8" in shown
    undone = surgeon("undo", "--yes", "--why", "by mistake", "-C", root)
    assert "checkpoints and logs are byte for byte what they were before 0001" in undone.stdout
    assert snapshot(root) == before
    log = surgeon("log", "-C", root).stdout
    assert "why: by mistake" in log
    assert "(undone by 0002)" in log
    assert surgeon("undo", "--yes", "-C", root).exit_code == 2


def test_what_a_plan_has_shown_is_not_printed_once_more(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root, recipe, saved = trained(), tmp_path / "recipe.yaml", tmp_path / "plan.json"
    recipe.write_text(RECIPE)
    row = "  checkpoints  > 6 8 "
    assert row in surgeon("plan", recipe, "-o", saved, "-C", root).stdout
    for source in (saved, recipe):
        assert row in surgeon("apply", source, "--dry-run", "-C", root).stdout
        done = surgeon("apply", source, "--yes", "-C", root).stdout
        assert row not in done and "  step 5 will use   " in done and "done: receipt " in done
        shown = surgeon("undo", "-n", "-C", root).stdout
        assert "  checkpoints  < 6 8 " in shown and "brings back" not in shown
        assert "brings back" in surgeon("undo", "-nv", "-C", root).stdout
        undone = surgeon("undo", "--yes", "-C", root).stdout.splitlines()
        assert len(undone) <= 8 and any("byte for byte" in line for line in undone)
        redo = surgeon("redo", "-vy", "-C", root).stdout
        assert row in redo and "appends to" in redo and "done: receipt " in redo
        assert surgeon("undo", "--yes", "-C", root).exit_code == 0


def test_an_undo_names_a_step_that_somebody_removed_since(surgeon: Surgeon, tmp_path: Path) -> None:
    """It brings back what the surgery changed, and the run is not what it was."""
    root = make_run(tmp_path / "run", (2, 4, 8))
    assert surgeon("rollback", "--to", 4, "--yes", "-C", root).exit_code == 0
    shutil.rmtree(next(root.glob("*2")))
    told = surgeon("undo", "--yes", "-C", root).stdout
    assert "  note  removed since 0001, and not brought back: step 2" in told
    assert "what it changed is byte for byte" in told and "the run is" not in told


def test_a_steps_folder_stands_for_its_run_and_that_is_said(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    root = make_run(tmp_path / "run", (2, 4, 8))
    older, newest = (next(root.glob(f"*-{step}")) for step in (4, 8))
    told = " ".join(surgeon("set-lr", "5e-4", "-n", "-C", older).stdout.split())
    assert f"{older.name} stands for its run: step 8 is edited, not 4" in told
    for words in (("set-lr", "5e-4", "-C", newest), ("rollback", "--to", 2, "-C", older)):
        assert "stands for" not in surgeon(*words, "-n").stdout


def test_a_log_folder_that_is_named_and_is_not_there_is_said(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    root = make_run(tmp_path / "run", (4, 8))
    (root / "ckptsurgeon.yaml").write_text("tensorboard: [../logs, .]")
    assert "../logs is not there" in surgeon("status", "-C", root).stdout
    told = surgeon("rollback", "--to", 4, "-n", "-C", root).stdout
    assert "names the log folder ../logs, which is not there" in " ".join(told.split())
    (tmp_path / "logs").mkdir()
    assert "not there" not in surgeon("rollback", "--to", 4, "-n", "-C", root).stdout


def test_names_and_reasons_that_are_not_utf_8(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    why = os.fsdecode(b"caf\xe9")
    job = root / "job.sh"
    assert surgeon("relaunch", "--slurm", "-o", job, "-C", root, f"name={why}").exit_code == 0
    assert b"name=caf\xe9" in job.read_bytes()
    (root / "tensorboard").rename(root / os.fsdecode(b"log\xe9"))
    config = root / "train.yaml"
    lines = config.read_bytes().splitlines()
    kept = [line for line in lines if not line.startswith(b"sgd_momentum")]
    config.write_bytes(b"\n".join([b"# caf\xe9", *kept]))
    before = snapshot(root)
    words = ("--keep-tb", why, "--why", why, "--yes", "-C", root)
    assert surgeon("rollback", "--to", 4, *words).exit_code == 0
    assert surgeon("swap-optimizer", "sgdw", "--why", why, "--yes", "-C", root).exit_code == 0
    assert config.read_bytes().startswith(b"# caf\xe9\n")
    assert b"\nsgd_momentum: 0.9\n" in config.read_bytes()
    for _ in range(2):
        assert surgeon("undo", "--yes", "-C", root).exit_code == 0
    assert snapshot(root) == before


def test_looking_leaves_the_run_alone(surgeon: Surgeon, trained: Trained, tmp_path: Path) -> None:
    root = trained()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    before = snapshot(root)
    for words in (
        ["status"],
        ["show", 4],
        ["log"],
        ["verify"],
        ["verify", 2],
        ["plan", recipe],
        ["apply", recipe, "--dry-run"],
        ["set-lr", "5e-4", "-n"],
        ["reset", "moments", "-n"],
        ["recover"],
        ["recover", "-n"],
        ["relaunch", "-n"],
    ):
        result = surgeon(*words, "-C", root)
        assert (result.exit_code, result.stderr) == (0, ""), words
        assert result.stdout, words
        assert surgeon(*words, "-q", "-C", root).stdout == "", words
    assert snapshot(root) == before
    assert not (root / ".ckptsurgeon").exists()


def test_plan_exits_3_until_the_recipe_is_applied(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    wanted = ["plan", recipe, "set.beta2=0.9", "--exit-code", "-C", root]
    assert surgeon(*wanted).exit_code == 3
    assert surgeon("apply", recipe, "set.beta2=0.9", "--yes", "-C", root).exit_code == 0
    again = surgeon(*wanted)
    assert again.exit_code == 0
    assert again.stdout.startswith("nothing to do: ")
    repeated = surgeon("apply", recipe, "set.beta2=0.9", "-C", root)
    assert repeated.exit_code == 0
    assert repeated.stdout.startswith("nothing to do: ")


def test_a_kept_plan_is_applied_once_and_only_to_what_it_saw(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    recipe, kept = tmp_path / "recipe.yaml", tmp_path / "plan.json"
    recipe.write_text(RECIPE)
    assert surgeon("plan", recipe, "-o", kept, "-C", root).exit_code == 0
    assert surgeon("plan", recipe, "-o", kept, "-C", root).exit_code == 2
    assert surgeon("set", "eps=1e-6", "--yes", "-C", root).exit_code == 0
    before = snapshot(root)
    stale = surgeon("apply", kept, "--yes", "-C", root)
    assert stale.exit_code == 1
    assert snapshot(root) == before
    surgeon("undo", "--yes", "-C", root)
    kept.unlink()
    surgeon("plan", recipe, "-o", kept, "-C", root)
    done = surgeon("apply", kept, "--yes", "-C", root)
    assert (done.exit_code, "done: receipt 0003" in done.stdout) == (0, True)
    assert "why: spike" in surgeon("log", "-C", root).stdout


def test_without_a_terminal_only_yes_counts(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    before = snapshot(root)
    for words in (["set-lr", "5e-4"], ["set-lr", "5e-4", "--json"], ["set-lr", "5e-4", "-q"]):
        result = surgeon(*words, "-C", root, input="y\n")
        assert result.exit_code == 1, words
        assert "--yes" in result.stderr
    assert snapshot(root) == before
    assert not (root / ".ckptsurgeon").exists()


@pytest.mark.parametrize(("typed", "status"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("\x03", 130)])
@pytest.mark.long
def test_on_a_terminal_it_asks(trained: Trained, typed: str, status: int) -> None:
    root = trained()
    before = snapshot(root)
    ended, output = on_terminal(typed, "set-lr", "5e-4", "-C", root)
    assert "apply? [y/N] " in output
    assert ended == status
    assert (snapshot(root) == before) == (status != 0)
    assert ("declined: nothing was changed" in output) == (status == 1)
    assert ("untouched: the run is exactly as it was" in output) == (status == 130)
    assert ("\nerror: stopped" in output.replace("\r", "")) == (status == 130)


def test_the_run_is_found_from_below_from_outside_and_by_the_environment(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = trained()
    told = surgeon("status", "-C", root).stdout
    assert surgeon("-C", root, "status").stdout == told
    assert surgeon("-C", tmp_path, "status", "--run", root).stdout == told
    monkeypatch.chdir(root / "global_step4")
    assert surgeon("status").stdout == told
    monkeypatch.chdir(tmp_path)
    assert surgeon("status").exit_code == 2
    assert surgeon("status", CKPTSURGEON_RUN=str(root)).stdout == told
    assert surgeon("status", "-C", root, CKPTSURGEON_RUN=str(tmp_path)).stdout == told
    assert surgeon("-C", root, "status", CKPTSURGEON_RUN=str(tmp_path)).stdout == told


def test_json_of_an_edit_is_one_document(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    result = surgeon("set-lr", "--scale", "0.5", "--json", "--yes", "-C", root)
    told = json.loads(result.stdout)
    assert (told["applied"], told["receipt"], told["step"]) == (True, "0001", 8)
    assert told["promise"]["lr"] == pytest.approx(told["before"]["lr"] / 2, rel=0.2)
    assert {change["field"] for change in told["changes"]} == {"lr", "tensorboard"}
    shown = json.loads(surgeon("show", 8, "--json", "-C", root).stdout)
    assert shown["promise"] == told["promise"]


def test_a_dry_run_writes_no_plan_and_says_that_one_is_stale(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    recipe, kept = tmp_path / "recipe.yaml", tmp_path / "plan.json"
    recipe.write_text("set: {lr: 5e-4}")
    assert surgeon("plan", recipe, "-o", kept, "--dry-run", "-C", root).exit_code == 0
    assert not kept.exists()
    surgeon("plan", recipe, "-o", kept, "-C", root)
    assert surgeon("apply", kept, "--dry-run", "-C", root).exit_code == 0
    surgeon("set", "beta1=0.8", "--yes", "-C", root)
    stale = surgeon("apply", kept, "--dry-run", "-C", root)
    assert (stale.exit_code, stale.stdout) == (1, "")
    assert "another surgery was done since" in stale.stderr
    assert f"plan RECIPE -o plan.json    {kept} is stale" in stale.stderr


def test_a_rate_that_leaps_is_pointed_out(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    told = surgeon("set-lr", "30", "--dry-run", "-C", root).stdout
    assert "set lr=30\n" in told
    assert "the peak rises to 30,000 times what it was: 1.000e-03 → 3.000e+01" in told
    refused = surgeon("set-lr", "300001x", "--dry-run", "-C", root)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "next: lr is at most 100\n" in refused.stderr
    endless = surgeon("set-lr", "1e309x", "--dry-run", "-C", root)
    assert (endless.exit_code, endless.stdout) == (2, "")
    assert "next: write a finite number\n" in endless.stderr
    assert "times what it was" not in surgeon("set-lr", "9e-3", "--dry-run", "-C", root).stdout


def test_a_share_that_was_meant_as_a_rate_is_pointed_out(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    told = surgeon("set-lr", "3e-5x", "--min-lr", "0", "--dry-run", "-C", root).stdout
    assert "the peak falls to 3e-05 times what it was: 1.000e-03 → 3.000e-08" in told


def test_what_is_so_already_has_no_note(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    told = surgeon("set", "beta2=0.95", "--dry-run", "-C", root).stdout
    assert told == "nothing to do: set beta2=0.95 would change nothing in run\n"
