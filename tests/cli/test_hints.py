"""What a command prints as the next one works when it is typed as it stands, where it stood."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from tests.cli.conftest import Surgeon, hints
from tests.conftest import Trained
from tests.formats.matrix import hugging_face
from tests.support.snapshot import snapshot
from tests.support.tiny_run import GROUP, make_run, write_torch_file


def away(trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str = "a run") -> Path:
    """A run with a space in its name, named relatively from the folder beside it."""
    root = trained()
    root = root.rename(root.with_name(name))
    monkeypatch.chdir(root.parent)
    return root


def test_undo_and_resume_are_found_from_another_folder(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = away(trained, monkeypatch)
    done = surgeon("set-lr", "5e-4", "--yes", "-C", root.name)
    undo, relaunch = hints(done.stdout)
    assert undo == ["-C", "a run", "undo", "0001"]
    assert surgeon(*relaunch, "--dry-run").exit_code == 0
    assert surgeon(*undo, "--yes").exit_code == 0
    monkeypatch.chdir(root)
    done = surgeon("set-lr", "5e-4", "--yes", "-C", ".")
    assert "  undo     ckptsurgeon undo 0003\n" in done.stdout


@pytest.mark.parametrize("words", [["set-lr", "5e-4"], ["status"], ["doctor"]])
def test_the_remedy_for_a_pointer_to_nothing(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch, words: Sequence[str]
) -> None:
    root = away(trained, monkeypatch)
    (root / "latest").write_text("global_step99")
    told = surgeon(*words, "-C", root.name)
    (remedy,) = hints(told.stdout + told.stderr)
    assert surgeon(*remedy, "--yes").exit_code == 0
    assert (root / "latest").read_text() == "global_step8"


def test_a_step_in_the_attic_is_named_with_the_surgery_to_undo(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = away(trained, monkeypatch)
    assert surgeon("rollback", "4", "--yes", "-C", root.name).exit_code == 0
    told = surgeon("rollback", "--to", "8", "-C", root.name)
    undo, *_ = hints(told.stderr)
    assert undo == ["-C", "a run", "undo", "0001"]
    assert surgeon("set-lr", "5e-4", "--yes", "-C", root.name).exit_code == 0
    log, *_ = hints(surgeon("show", "8", "-C", root.name).stderr)
    assert log == ["-C", "a run", "log"]
    assert surgeon("undo", "--yes", "-C", root.name).exit_code == 0
    assert surgeon(*undo, "--yes").exit_code == 0
    assert surgeon("show", "8", "-C", root.name).exit_code == 0
    surgeon("rollback", "4", "--yes", "-C", root.name)
    assert surgeon("prune", "--keep", "0", "--yes", "-C", root.name).exit_code == 0
    assert "moved step 8" not in surgeon("show", "8", "-C", root.name).stderr


@pytest.mark.parametrize("words", [["skip", "5-7"], ["rollback", "4", "--skip", "5-7"]])
def test_a_trainer_without_skips_is_sent_back_to_where_its_data_moves(
    surgeon: Surgeon, tmp_path: Path, words: Sequence[str]
) -> None:
    root = make_run(tmp_path / "run", [4, 8])
    (hint,) = hints(surgeon(*words, "-C", root).stderr)
    assert hint[2:] == ["rollback", "--to", "4", "--set", "iteration=7"]
    assert surgeon(*hint, "--yes").exit_code == 0
    (none,) = hints(surgeon("skip", "1-2", "-C", root).stderr)
    assert none[2:] == ["status"]


def test_two_steps_that_are_not_saved_are_told_at_once(surgeon: Surgeon, tmp_path: Path) -> None:
    told = surgeon("diff", "10", "20", "-C", make_run(tmp_path / "run")).stderr
    assert "steps 10 and 20 are not saved" in told and hints(told)[0][-1] == "status"


@pytest.mark.parametrize("half", [False, True])
def test_doctor_names_the_step_to_go_back_to(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    root = away(trained, monkeypatch)
    for step, cut in ((6, half), (8, True)):
        shard = next((root / f"global_step{step}").glob("*optim_states.pt"))
        if cut:
            shard.write_bytes(shard.read_bytes()[:1000])
    told = surgeon("doctor", "-C", root.name)
    assert told.exit_code == 4
    (remedy,) = hints(told.stdout)
    assert remedy[2:] == ["rollback", "--to", "4" if half else "6"]
    assert surgeon(*remedy, "--yes").exit_code == 0
    assert surgeon("doctor", "-C", root.name).exit_code == 0


def test_repair_passes_over_a_half_copied_shard(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    shard = next((root / "global_step8").glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:1000])
    done = surgeon("repair-latest", "--yes", "-C", root)
    assert done.exit_code == 0, done.stderr
    assert (root / "latest").read_text() == "global_step6"
    assert "note  newer steps are incomplete or damaged: 8" in done.stdout


def test_a_run_without_any_step_says_so(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    for folder in root.glob("global_step*"):
        shutil.rmtree(folder)
    for words in (["verify"], ["doctor"]):
        told = surgeon(*words, "-C", root)
        assert told.exit_code == 1
        assert "step 0" not in told.stderr


def test_a_branch_says_how_to_go_on_in_it(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = away(trained, monkeypatch)
    made = surgeon("fork", "b run", "--copy", "-C", root.name)
    look, start = hints(made.stdout)
    assert surgeon(*look).exit_code == 0
    assert surgeon(*start, "--dry-run").exit_code == 0
    again = surgeon("fork", "b run", "--dry-run", "-C", root.name)
    assert (again.exit_code, "already exists" in again.stderr) == (2, True)


def test_logs_alone_are_undone_by_the_hint_and_not_relaunched(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    logs = tmp_path / "logs of a run"
    shutil.copytree(trained() / "tensorboard", logs)
    cut = ["truncate-tb-events", "--after", 5, "--tb", logs, "--yes"]
    refused = surgeon(*cut, "--relaunch")
    assert (refused.exit_code, (logs / ".ckptsurgeon").exists()) == (2, False)
    done = surgeon(*cut)
    assert "+ 1 file in ./: a note at step 5" in done.stdout
    (undo,) = hints(done.stdout)
    told = surgeon("status", "-C", logs)
    assert "problem" not in told.stdout
    undone = surgeon(*undo, "--yes")
    assert undone.exit_code == 0, undone.stderr
    assert "relaunch" not in undone.stdout


def test_no_surgery_before_a_relaunch_that_can_not_be(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    (root / "train.yaml").unlink()
    refused = surgeon("set-lr", "5e-4", "--yes", "--relaunch", "-C", root)
    assert refused.exit_code == 1
    assert "no launch command is recorded" in refused.stderr
    assert not (root / ".ckptsurgeon").exists()
    (root / "ckptsurgeon.yaml").write_text("relaunch: {command: [/no/such/trainer]}")
    failed = surgeon("set-lr", "5e-4", "--yes", "--relaunch", "-C", root)
    assert failed.exit_code == 1
    assert "the run is exactly as it was" not in failed.stderr
    assert "undo 0001" in failed.stdout


def test_undo_says_why_it_can_not(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("set-lr", "5e-4", "--yes", "-C", root)
    surgeon("undo", "--yes", "-C", root)
    for id, why in (
        ([], "there is no surgery to undo: all of them are undone"),
        (["1"], "receipt 0001 is undone already, by 0002"),
        (["0002"], "receipt 0002 is itself an undo"),
        (["7"], "there is no receipt 0007"),
    ):
        told = surgeon("undo", *id, "--yes", "-C", root)
        assert told.exit_code == 2
        assert why in told.stderr
        if id in (["1"], ["0002"]):
            assert surgeon(*hints(told.stderr)[0], "-n").exit_code == 0


def test_a_skip_of_the_past_goes_back_first(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    before = snapshot(root)
    told = surgeon("skip", "5", "--yes", "-C", root)
    assert (told.exit_code, snapshot(root) == before) == (2, True)
    assert "error: iteration 5 is past: the run stands at 8\n" in told.stderr
    (back,) = hints(told.stderr)
    assert back[2:] == ["rollback", "--to", "4", "--skip", "5"]
    assert surgeon(*back, "--yes").exit_code == 0
    assert "skip          5" in surgeon("status", "-C", root).stdout
    assert surgeon("skip", "30-30", "-n", "-C", root).stdout.startswith("run   skip 30\n")
    assert surgeon("skip", "1", "-C", root).exit_code == 2
    two = "only the iterations 30 and 50 are skipped; 30-50 is the range"
    assert two in surgeon("skip", "30", "50", "-n", "-C", root).stdout
    for typed in (["30-50"], ["30", "31"], ["30", "40", "50"]):
        assert "is the range" not in surgeon("skip", *typed, "-n", "-C", root).stdout


@pytest.mark.parametrize("typed", ["10-11", "11-12", "5-6"])
def test_a_skip_by_counters_says_where_it_can_begin(
    surgeon: Surgeon, trained: Trained, typed: str
) -> None:
    root = trained()
    told = surgeon("skip", typed, "--by-counters", "--yes", "-C", root)
    assert told.exit_code == 2
    (next_one,) = hints(told.stderr)
    assert surgeon(*next_one, "--yes").exit_code == 0


def test_a_run_whose_launch_is_not_known_is_not_sent_to_relaunch(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    assert "  resume   ckptsurgeon " in surgeon("set-lr", "5e-4", "--yes", "-C", root).stdout
    (root / "train.yaml").unlink()
    done = surgeon("set-lr", "4e-4", "--yes", "-C", root).stdout
    assert "  resume   restart its trainer with the same command\n" in done
    assert " relaunch" not in done


def test_the_undo_of_a_rollback_says_how_a_lost_pointer_comes_back(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    before = snapshot(root)
    surgeon("rollback", "4", "--yes", "-C", root)
    (root / "latest").unlink()
    told = surgeon("undo", "--yes", "-C", root)
    assert (told.exit_code, told.stdout) == (1, "")
    assert "error: latest, which receipt 0001 changed, no longer exists\n" in told.stderr
    remedy = told.stderr.split("next: ")[1].split("    ")[0]
    subprocess.run(["sh", "-c", remedy], check=True)
    assert surgeon("undo", "--yes", "-C", root).exit_code == 0
    assert snapshot(root) == before


def test_a_damaged_latest_step_leads_from_status_to_the_way_back(
    surgeon: Surgeon, trained: Trained
) -> None:
    root = trained()
    (root / "global_step8" / "mp_rank_00_model_states.pt").write_bytes(b"")
    for words in (["status"], ["verify"]):
        (doctor,) = hints(surgeon(*words, "-C", root).stdout)
        assert doctor[2:] == ["doctor"]
    (back,) = hints(surgeon(*doctor).stdout)
    assert surgeon(*back, "--yes").exit_code == 0
    assert surgeon("doctor", "-C", root).exit_code == 0


def test_a_half_written_trainer_state_leads_to_the_way_back(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    """The Trainer writes it last."""
    hugging_face(tmp_path)
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:9])
    for words in (["status"], ["set-lr", "1e-4", "--yes"]):
        result = surgeon(*words, "-C", tmp_path)
        (doctor,) = hints(result.stdout + result.stderr)
        assert doctor[2:] == ["doctor"]
    (back,) = hints(surgeon(*doctor).stdout)
    assert surgeon(*back, "--yes").exit_code == 0
    assert "at step 2 " in surgeon("status", "-C", tmp_path).stdout


def test_status_tells_damage_from_links_and_from_missing_files(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    (root / "global_step2" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (root / "global_step4").rename(tmp_path / "elsewhere")
    (root / "global_step4").symlink_to(tmp_path / "elsewhere")
    next((root / "global_step6").glob("*optim_states.pt")).unlink()
    told = surgeon("status", "-C", root).stdout
    assert "damaged: 2   symlinked: 4   incomplete: 6\n" in told


def test_the_log_marks_what_can_not_be_undone(surgeon: Surgeon, trained: Trained) -> None:
    root = trained()
    surgeon("rollback", "6", "--yes", "-C", root)
    surgeon("rollback", "4", "--yes", "-C", root)
    surgeon("prune", "--keep", 1, "--yes", "-C", root)
    log = surgeon("log", "-C", root).stdout.splitlines()
    assert (log[0], log[2]) == (
        "0002   rollback 6 → 4",
        "0001   rollback 8 → 6   (pruned: no undo)",
    )
    document = json.loads(surgeon("log", "--json", "-C", root).stdout)
    assert [item["pruned"] for item in document["receipts"]] == [False, True]


def test_where_the_run_stands_already_is_said_in_words(surgeon: Surgeon, trained: Trained) -> None:
    told = surgeon("rollback", "8", "--dry-run", "-C", trained()).stdout
    assert told == "nothing to do: run is already at step 8\n"


def test_what_can_not_be_made_or_started_is_named(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    for words in (["export", "8", "-o", "/proc/weights"], ["fork", "/proc/branch", "--copy"]):
        told = surgeon(*words, "-C", root)
        assert (told.exit_code, "can't be made: " in told.stderr) == (1, True)
        assert ".partial" not in told.stderr
    (root / "ckptsurgeon.yaml").write_text("relaunch: {command: [nosuchprog]}")
    told = surgeon("relaunch", "-C", root)
    assert told.exit_code == 1
    assert "error: the trainer can't be started: nosuchprog: No such file" in told.stderr
    assert f"next: correct relaunch.command in {root}/ckptsurgeon.yaml\n" in told.stderr


@pytest.mark.parametrize("rate", ["-1", "-5e-4"])
def test_no_other_rate_is_made_of_a_negative_one(surgeon: Surgeon, rate: str) -> None:
    """1 for -1 would be hundreds of times the peak."""
    said = surgeon("set-lr", rate, "-n").stderr
    assert f"{rate}: the learning rate can't be negative" in said
    assert "next: give a rate of at least 0, or a factor of the present one: 3e-5, 0.5x" in said


def test_the_same_command_is_printed_in_full(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = away(trained, monkeypatch)
    look, do = hints(surgeon("rollback", "4", "--why", "a spike", "-C", root.name).stderr)
    typed = ["rollback", "4", "--why", "a spike", "-C", "a run"]
    assert (look, do) == ([*typed, "--dry-run"], [*typed, "--yes"])
    assert surgeon(*do).exit_code == 0
    monkeypatch.chdir(root)
    (prune,) = hints(surgeon("prune", "--keep", "0", "--yes").stderr)
    assert surgeon(*prune).exit_code == 0


@pytest.mark.parametrize("words", [["rollback", "--to", "5"], ["show", "5"], ["verify", "5"]])
def test_a_step_that_is_not_saved_is_typed_again_with_one_that_is(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    root = away(trained, monkeypatch)
    told = surgeon(*words, "-n", "-C", root.name, "--json")
    assert told.exit_code == 2
    error = json.loads(told.stderr)
    assert error["comment"] == ["step 4 is saved", "step 6 is saved", "list all steps"]
    for hint in error["next"]:
        followed = surgeon(*shlex.split(hint)[1:])
        assert followed.exit_code == 0, followed.stderr
    assert "4" in shlex.split(error["next"][0])


@pytest.mark.parametrize(
    "words", [["rollback", "--to", "6"], ["show", "6"], ["fork", "b", "--step", "6"]]
)
def test_damage_at_an_older_step_is_looked_up_there(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    root = away(trained, monkeypatch)
    (root / "global_step6" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (look,) = hints(surgeon(*words, "-C", root.name).stderr)
    assert look[2:] == ["verify", "6"]
    told = surgeon(*look)
    assert told.exit_code == 4
    (before,) = hints(told.stdout)
    assert before[2:] == ["verify", "4"]
    assert surgeon(*before).exit_code == 0


def test_all_names_that_a_trainer_saves_are_allowed_in_one_command(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    """As MMEngine saves five of its own with every step."""
    root = make_run(tmp_path / "run")
    names = [Decimal("1"), Fraction(1, 2), Counter("a")]
    group = {**GROUP, "params": [0]}
    adam = {"state": {0: {"step": 4.0}}, "param_groups": [group], "history": names}
    write_torch_file(root / "checkpoint-4" / "optimizer.pt", adam)
    refused = surgeon("set", "beta2=0.9", "-y", "-C", root)
    assert refused.exit_code == 1 and "not known to be harmless" in refused.stderr
    (allowed,) = hints(refused.stderr)
    assert allowed.count("--allow-global") >= 2
    assert surgeon(*allowed).exit_code == 0
