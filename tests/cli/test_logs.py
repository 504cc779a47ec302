"""Event files without checkpoints: cut, renamed and brought back with --tb."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from pathlib import Path

import pytest

from ckptsurgeon.logs.tensorboard import event_file, message
from tests.cli.conftest import Surgeon
from tests.conftest import Trained
from tests.support.snapshot import snapshot


@pytest.fixture
def logs(trained: Trained, tmp_path: Path) -> list[Path]:
    """Two log folders; the second one has the same log in a sub-run."""
    root = trained()
    one, two = tmp_path / "one", tmp_path / "two"
    shutil.copytree(root / "tensorboard", one)
    shutil.copytree(root / "tensorboard", two / "inner" / "deep")
    return [one, two]


def test_bare_logs_are_cut_renamed_and_brought_back(surgeon: Surgeon, logs: list[Path]) -> None:
    before = [snapshot(folder) for folder in logs]
    where = ["--tb", logs[0], "--tb", logs[1]]
    result = surgeon("truncate-tb-events", "--after", 5, *where, "--yes")
    assert result.exit_code == 0, result.stderr
    cut = sorted(path.parent.relative_to(logs[1].parent) for path in logs[1].rglob("*tfevents*"))
    assert [str(path) for path in cut] == ["two/inner/deep", "two/inner/deep/cut-0001"]
    notes = [path for folder in logs for path in folder.rglob("*.ckptsurgeon") if path.is_file()]
    assert len(notes) == 1

    result = surgeon("truncate-tb-events", "--after", 5, *where, "--yes")
    assert result.stdout.startswith("nothing to do")

    tag = "lm-loss-training/lm loss"
    result = surgeon("rename-tb-events", tag, "loss", *where, "--yes")
    assert result.exit_code == 0, result.stderr
    assert f"{tag} → loss: 5 events" in result.stdout

    for id in ("0002", "0001"):
        assert surgeon("undo", id, "-C", logs[0], "--yes").exit_code == 0
    assert [snapshot(folder) for folder in logs] == before
    assert not (logs[1] / "inner" / "deep" / "cut-0001").exists()


def test_a_note_is_written_for_whoever_looks_at_the_curves(
    surgeon: Surgeon, trained: Trained
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = trained()
    surgeon("set", "beta1=0.8", "--why", "the spike at 7", "--yes", "-C", root)
    surgeon("set", "beta1=0.7", "--no-tb-note", "--yes", "-C", root)
    log = EventAccumulator(str(root / "tensorboard"))
    log.Reload()
    events = log.Tensors("ckptsurgeon/surgery/text_summary")
    assert [event.step for event in events] == [8]
    text = events[0].tensor_proto.string_val[0].decode()
    assert "set beta1=0.8" in text
    assert "the spike at 7" in text
    assert len(log.Tensors("lm-loss-training/lm loss")) == 8


@pytest.mark.parametrize("behind_s", [0, 1800])
def test_a_note_does_not_hide_what_the_next_trainer_writes(
    surgeon: Surgeon, trained: Trained, behind_s: int
) -> None:
    """TensorBoard follows the file whose name is the last one; the clock in the names is the
    trainer's, and may be behind the one here."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = trained()
    (first,) = (root / "tensorboard").iterdir()
    moment = int(time.time()) - behind_s
    first.rename(first.with_name(re.sub(r"\d{10}", str(moment - 60), first.name)))
    surgeon("set", "beta1=0.8", "--yes", "-C", root)
    surgeon("set", "beta1=0.7", "--yes", "-C", root)
    log = EventAccumulator(str(root / "tensorboard"))
    log.Reload()
    assert len(log.Tensors("ckptsurgeon/surgery/text_summary")) == 2
    with (root / "tensorboard" / f"events.out.tfevents.{moment + 5}.vm.2.0").open("wb") as file:
        for count in (1, 2):
            event = message.text_event(moment + 5, 8 + count, "new", "text")
            file.write(event_file.frame(event))
            file.flush()
            log.Reload()
            assert len(log.Tensors("new")) == count


@pytest.mark.parametrize("words", [["set-lr", "1e-3"], ["rollback", "--to", "4"]])
def test_logs_have_no_checkpoint(surgeon: Surgeon, logs: list[Path], words: list[str]) -> None:
    surgeon("truncate-tb-events", "--after", 5, "--tb", logs[0], "--yes")
    result = surgeon(*words, "-C", logs[0])
    assert result.exit_code == 2
    assert "log directory without checkpoints" in result.stderr


def test_a_log_folder_that_is_not_there_is_wrong_usage(surgeon: Surgeon, tmp_path: Path) -> None:
    result = surgeon("rename-tb-events", "a", "b", "--tb", tmp_path / "none")
    assert result.exit_code == 2
    assert "is not a directory" in result.stderr


def test_an_axis_is_one_of_four(surgeon: Surgeon, logs: list[Path]) -> None:
    words = ["truncate-tb-events", "--after", 5, "--tb", logs[0], "--yes"]
    assert surgeon(*words, "--axis", "loss=hours").exit_code == 2
    assert surgeon(*words, "--axis", "lm-loss-training/lm loss=iteration").exit_code == 0


def test_a_link_to_logs_is_not_followed_and_that_is_said(
    surgeon: Surgeon, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    (root / "tensorboard").rename(tmp_path / "elsewhere")
    (root / "tensorboard").symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path / "elsewhere")
    result = surgeon("rollback", "--to", 4, "--yes", "-C", root)
    assert "tensorboard: [tensorboard]" in result.stdout
    assert snapshot(tmp_path / "elsewhere") == before
    assert surgeon("undo", "--yes", "-C", root).exit_code == 0
    (root / "ckptsurgeon.yaml").write_text("tensorboard: [tensorboard]")
    result = surgeon("rollback", "--to", 4, "--yes", "-C", root)
    assert "is a link" not in result.stdout
    assert snapshot(tmp_path / "elsewhere") != before


def test_a_tag_may_be_called_as_a_word_of_our_own_files(
    surgeon: Surgeon, logs: list[Path], tmp_path: Path
) -> None:
    before = snapshot(logs[0])
    names = tmp_path / "map.yaml"
    names.write_text("lm-loss-training/lm loss: loss\nkind: Move\n")
    words = ("rename-tb-events", "--map", names, "--tb", logs[0], "--yes")
    assert surgeon(*words).exit_code == 0
    assert surgeon("undo", "-C", logs[0], "--yes").exit_code == 0
    assert snapshot(logs[0]) == before


def test_a_folder_without_logs_is_wrong_usage(surgeon: Surgeon, tmp_path: Path) -> None:
    result = surgeon("truncate-tb-events", "--after", 5, "--tb", tmp_path)
    assert result.exit_code == 2
    assert f"no event file in {tmp_path}" in result.stderr


def test_a_branch_is_named_by_its_path_and_must_be_there(
    surgeon: Surgeon, logs: list[Path]
) -> None:
    words = ["truncate-tb-events", "--after", 5, "--tb", logs[0], "--dry-run"]
    (file,) = logs[0].glob("*tfevents*")
    assert surgeon(*words, "--branch", file).exit_code == 0
    wrong = surgeon(*words, "--branch", file.with_name("events.out.tfevents.7.other"))
    assert wrong.exit_code == 2
    assert "no event file is called events.out.tfevents.7.other" in wrong.stderr


@pytest.mark.parametrize("new", [r"x-\9", r"x-\q", r"x-\g<name>"])
def test_a_new_name_that_the_pattern_can_not_fill_is_wrong_usage(
    surgeon: Surgeon, logs: list[Path], new: str
) -> None:
    result = surgeon("rename-tb-events", "lm-(.*)", new, "--regex", "--tb", logs[0])
    assert result.exit_code == 2
    assert "groups in the pattern: 1" in result.stderr


def test_a_tag_that_is_nowhere_is_told_its_nearest(
    surgeon: Surgeon, logs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(logs[0])
    monkeypatch.chdir(logs[0].parent)
    told = surgeon("rename-tb-events", "lm loss", "x/lm loss", "--tb", "one", "--yes")
    assert (told.exit_code, told.stdout) == (2, "")
    assert "error: no event has the tag 'lm loss'\n" in told.stderr
    hint = told.stderr.splitlines()[2].removeprefix("next: ckptsurgeon ")
    assert "rename-tb-events 'lm-loss-training/lm loss' 'x/lm loss'" in hint
    assert surgeon(*shlex.split(hint), "--dry-run").exit_code == 0
    for words in (["nothing", "x"], ["lmm-(.*)", "x", "--regex"]):
        told = surgeon("rename-tb-events", *words, "--tb", "one", "--yes")
        assert told.exit_code == 2
        assert "next: the tags are: " in told.stderr
    assert snapshot(logs[0]) == before


def test_a_rename_is_done_once_and_counts_its_tags(surgeon: Surgeon, logs: list[Path]) -> None:
    where = ["--tb", logs[0], "--yes"]
    literal = ["rename-tb-events", "lm-loss-training/lm loss", "loss", *where]
    pattern = ["rename-tb-events", "grad-(.*)", r"\1", "--regex", *where]
    done = surgeon(*pattern)
    assert "rename tags like grad-(.*)\n" in done.stdout
    assert "rename 1 tag\n" in surgeon(*literal).stdout
    for words in (literal, pattern):
        again = surgeon(*words)
        assert (again.exit_code, again.stdout.split(":")[0]) == (0, "nothing to do")
