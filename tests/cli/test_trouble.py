"""Broken runs: three lines that lead on, the right exit code, and the run as it was."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsurgeon import Hyperparameters, Recipe, disk, surgery
from ckptsurgeon.errors import InterruptedSurgery
from ckptsurgeon.run.run import Run
from tests.cli.conftest import Surgeon, hints
from tests.conftest import Trained
from tests.formats.matrix import hugging_face
from tests.support.snapshot import snapshot


def _no_pointer(root: Path) -> None:
    (root / "latest").unlink()


def _pointer_to_nothing(root: Path) -> None:
    (root / "latest").write_text("global_step99")


def _pointers_disagree(root: Path) -> None:
    (root / "latest").write_text("global_step4")


@pytest.mark.parametrize("breaks", [_no_pointer, _pointer_to_nothing, _pointers_disagree])
def test_status_works_with_a_broken_latest_and_repair_mends_it(
    surgeon: Surgeon, trained: Trained, breaks: Callable[[Path], None]
) -> None:
    root = trained()
    before = snapshot(root)
    breaks(root)
    told = surgeon("status", "-C", root)
    assert told.exit_code == 0
    assert f"ckptsurgeon -C {root} repair-latest" in told.stdout
    assert json.loads(surgeon("status", "--json", "-C", root).stdout)["problem"]["exit_code"] == 1
    refused = surgeon("set-lr", "5e-4", "--yes", "-C", root)
    assert refused.exit_code == 1
    assert f"next: ckptsurgeon -C {root} repair-latest" in refused.stderr
    assert surgeon("verify", "-C", root).exit_code == 4
    mended = surgeon("repair-latest", "--no-tb-note", "--yes", "-C", root)
    assert mended.exit_code == 0, mended.stderr
    assert (root / "latest").read_text() == "global_step8"
    assert snapshot(root).keys() == before.keys()
    assert surgeon("verify", "-C", root).exit_code == 0


def test_no_pointer_is_said_to_be_set_where_the_trainer_keeps_none(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    """The Hugging Face Trainer resumes the highest step."""
    hugging_face(tmp_path)
    assert surgeon("repair-latest", "--yes", "-C", tmp_path).stdout.startswith("nothing to do")
    refused = surgeon("repair-latest", "--to", "2", "--yes", "-C", tmp_path)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "the trainer keeps no pointer and resumes the highest step" in refused.stderr
    assert "rollback --to 2    moves the later ones away" in refused.stderr


def test_a_step_that_is_not_there_names_the_nearest(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    before = snapshot(root)
    for words in (["rollback", "--to", 5, "--yes"], ["show", 5], ["verify", 5]):
        result = surgeon(*words, "-C", root)
        assert result.exit_code == 2, words
        assert "step 4" in result.stderr
        assert "step 6" in result.stderr
    assert snapshot(root) == before


def test_an_incomplete_checkpoint_names_the_missing_shards(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    shard = next((root / "global_step6").glob("*optim_states.pt"))
    shard.unlink()
    before = snapshot(root)
    result = surgeon("rollback", "--to", 6, "--yes", "-C", root)
    assert result.exit_code == 1
    assert shard.name in result.stderr
    assert f"ckptsurgeon -C {root} rollback --to 4 " in result.stderr
    assert "incomplete: 6" in surgeon("status", "-C", root).stdout
    assert snapshot(root) == before


def test_damage_is_exit_4(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    assert surgeon("verify", 6, "-C", root).stdout.startswith("sound: step 6")
    shard = next((root / "global_step6").glob("*optim_states.pt"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    result = surgeon("verify", 6, "-C", root)
    assert result.exit_code == 4
    assert shard.name in result.stdout
    assert json.loads(surgeon("verify", 6, "--json", "-C", root).stdout)["sound"] is False
    shown = surgeon("show", 6, "-C", root)
    assert shown.exit_code == 1
    assert shown.stderr.startswith("error: ")


def test_one_damage_is_one_finding(surgeon: Surgeon, trained: Trained) -> None:
    """Two readers meet it: the one that looks for missing shards, and level 1."""
    root = trained()
    shard = root / "global_step8" / "mp_rank_00_model_states.pt"
    for content in (shard.read_bytes()[:5000], b""):
        shard.write_bytes(content)
        assert "level 2, 1 finding\n" in surgeon("verify", "-C", root).stdout
        assert surgeon("doctor", "-C", root).stdout.count(shard.name) == 1
        assert len(json.loads(surgeon("verify", "--json", "-C", root).stdout)["findings"]) == 1


def test_a_run_that_was_copied_by_half_is_led_to_its_newest_sound_step(
    surgeon: Surgeon, trained: Trained
) -> None:
    """The disk was full: pointers and newer shards are empty, and one more is cut short. No hint
    leads to what is damaged, and each can be followed."""
    root = trained()
    for file in (*root.glob("global_step8/*"), root / "latest", *root.glob("latest_*")):
        file.write_bytes(b"")
    shard = next((root / "global_step6").glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:5000])
    told = surgeon("doctor", "-C", root).stdout
    backs = [words for words in hints(told) if "rollback" in words]
    assert backs and all(words[-1] == "4" for words in backs)
    for words in (*backs, *(each for each in hints(told) if "repair-latest" in each)):
        assert surgeon(*words, "-n").exit_code == 0, words
    assert "global_step4" in surgeon("repair-latest", "-n", "-C", root).stdout
    for folder in root.glob("global_step[24]"):
        for file in folder.iterdir():
            file.write_bytes(b"")
    refused = surgeon("repair-latest", "-C", root).stderr
    assert shard.name in refused and "restore a step from a copy" in refused
    for folder in root.glob("global_step6"):
        shutil.rmtree(folder)
    refused = surgeon("repair-latest", "-C", root).stderr
    assert "no complete checkpoint" in refused and "restore a step from a copy" in refused


def test_a_rate_below_its_floor_is_refused(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    before = snapshot(root)
    result = surgeon("set-lr", "5e-6", "--yes", "-C", root)
    assert result.exit_code == 2
    assert "below min_lr" in result.stderr
    assert "--min-lr" in result.stderr
    assert snapshot(root) == before


def test_a_live_trainer_is_seen_and_left_alone(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    start = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    record = {"pid": os.getpid(), "start_time": start, "host": socket.gethostname()}
    (root / "trainer.pid").write_text(json.dumps(record))
    before = snapshot(root)
    result = surgeon("set-lr", "5e-4", "--yes", "-C", root)
    assert result.exit_code == 1
    assert f"process {os.getpid()}" in result.stderr
    assert f"next: kill {os.getpid()}    it saves a step, and ends\n" in result.stderr
    assert f"process {os.getpid()} is running" in surgeon("status", "-C", root).stdout
    assert snapshot(root) == before


def test_an_interrupted_surgery_waits_for_recover(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    plan = surgery.plan(run, Recipe(Hyperparameters(lr=5e-4)))

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "editing":
            raise KeyboardInterrupt

    with pytest.raises(InterruptedSurgery):
        surgery.apply(run, plan, progress=stop)
    told = surgeon("status", "-C", root)
    assert told.exit_code == 0
    shown = " ".join(told.stdout.split())
    assert f"interrupted: set lr=0.0005 ckptsurgeon -C {root} recover" in shown
    for words in (
        ["set-lr", "1e-4", "--yes"],
        ["rollback", "--to", 4, "-n"],
        ["undo", "--yes"],
        ["relaunch", "--check"],
        ["fork", root.parent / "branch", "--copy"],
        ["export", 4, "-o", root.parent / "weights"],
    ):
        refused = surgeon(*words, "-C", root)
        assert refused.exit_code == 5, words
        assert f"next: ckptsurgeon -C {root} recover" in refused.stderr
    verified = surgeon("verify", "-C", root)
    assert verified.exit_code == 4
    assert f"interrupted: set lr=0.0005: ckptsurgeon -C {root} recover" in verified.stdout
    assert surgeon("recover", "-n", "-C", root).stdout.startswith("would finish: set ")
    finished = surgeon("recover", "-C", root)
    assert finished.exit_code == 0
    assert "finished: set lr=0.0005; receipt 0001" in finished.stdout
    assert surgeon("recover", "-C", root).stdout.startswith("nothing to recover")
    assert surgeon("verify", "-C", root).exit_code == 0


def test_an_interrupted_undo_is_finished_and_can_be_taken_back(
    surgeon: Surgeon, trained: Trained
) -> None:
    """It says what it restored, as an undo that nobody interrupted, and its hint works."""
    root = trained()
    surgeon("set-lr", "5e-4", "--yes", "-C", root)
    after = Run.open(root).state(8).promise

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "editing":
            raise KeyboardInterrupt

    run = Run.open(root)
    with pytest.raises(InterruptedSurgery):
        surgery.apply(run, surgery.plan_undo(run), progress=stop)
    copy = shutil.copytree(root, root.parent / "copy")
    finished = surgeon("recover", "-C", root)
    assert (
        "receipt 0002; checkpoints and logs are byte for byte what they were before 0001"
        in finished.stdout
    )
    told = json.loads(surgeon("recover", "--json", "-C", copy).stdout)
    assert (told["receipt"], told["restored"]) == ("0002", "same")
    *_, back = hints(finished.stdout)
    assert back[-1:] == ["redo"]
    assert surgeon(*back, "--yes").exit_code == 0
    assert Run.open(root).state(8).promise == after


def test_a_missing_file_is_an_error_and_no_traceback(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    absent = tmp_path / "no" / "plan.json"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("set: {lr: 5e-4}")
    result = surgeon("plan", recipe, "-o", absent, "-C", root)
    assert result.exit_code == 2
    assert str(absent) in result.stderr


def test_a_done_surgery_that_can_not_be_verified_is_exit_4(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not said that the run is as it was."""
    root = trained()

    def meddle(operation: str, path: str, details: object) -> None:
        if operation == "remove_file" and path.endswith("/journal"):
            (root / "latest").write_text("global_step2")

    monkeypatch.setattr(disk.calls, "hook", meddle)
    result = surgeon("set", "beta1=0.8", "--yes", "-C", root)
    assert result.exit_code == 4
    assert "the pointers disagree" in result.stderr
    assert "undo 0001" in result.stderr


def test_a_surgery_that_is_alive_is_not_called_interrupted(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    run = Run.open(root)
    plan = surgery.plan(run, Recipe(Hyperparameters(lr=5e-4)))
    told: list[tuple[int, str]] = []

    def meanwhile(phase: str, done: int, total: int) -> None:
        if phase == "editing" and not told:
            for words in (["status"], ["set-lr", "1e-4", "--yes"], ["doctor"]):
                result = surgeon(*words, "-C", root)
                told.append((result.exit_code, result.stdout + result.stderr))

    surgery.apply(run, plan, progress=meanwhile)
    (_, status), (code, refused), (_, doctor) = told
    assert "under way: “set lr=0.0005”" in status
    assert code == 1
    assert "another surgery is under way: “set lr=0.0005”" in refused
    assert "a surgery is under way" in doctor
    assert not any("recover" in text for _, text in told)


def test_a_folder_that_is_gone_is_said_to_be(trained: Trained, tmp_path: Path) -> None:
    """Somebody cleaned up where the engineer stands."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from ckptsurgeon.cli import main; main()"
    for words in (["status"], ["undo", "--yes"], ["rollback", "--to", "4", "--yes"]):
        gone.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=gone, capture_output=True, text=True
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr.startswith("error: the folder that you are in is gone")
        assert "-C RUN" in done.stderr.splitlines()[2]


@pytest.mark.parametrize("module", ["typer", "ckptsurgeon.cli.build", "ckptsurgeon.cli.carry_out"])
def test_ctrl_c_while_a_command_is_loaded_is_three_lines(trained: Trained, module: str) -> None:
    """At the first import of a module: before there is a command line, and while one is loaded."""
    root = trained()
    code = f"""
import sys
class Stop:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
from ckptsurgeon.__main__ import main
main()
"""
    before = snapshot(root)
    words = [sys.executable, "-c", code, "-C", str(root), "rollback", "--to", "4", "--yes"]
    done = subprocess.run(words, capture_output=True, text=True)
    first, second, third = done.stderr.splitlines()
    assert (done.returncode, first) == (130, "error: stopped by Ctrl-C")
    assert second == "untouched: the run is exactly as it was" and third.startswith("next: ")
    assert snapshot(root) == before
