"""Nothing that is printed of a run is wider than the terminal; no command is broken in two."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ckptsurgeon import Hyperparameters, Recipe, surgery
from ckptsurgeon.errors import InterruptedSurgery
from ckptsurgeon.report.style import Row, Style, packed, table
from ckptsurgeon.run.run import Run
from tests.cli.conftest import Surgeon, hints
from tests.conftest import Trained
from tests.support.event_logs import spiked, write_log
from tests.support.tiny_run import make_run

WIDTHS = ("50", "80", "200")
WHY = "loss 6.4 → 14 between 7000 and 7010; back to the last good step, lower peak, skip the data"


def lines(text: str) -> list[str]:
    return [re.sub(r"\033\[\d*m", "", line) for line in text.splitlines()]


@pytest.fixture
def here(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = trained()
    root = root.rename(root.with_name("tr8-104B"))
    monkeypatch.chdir(root)
    return root


def narrow(surgeon: Surgeon, *words: object, width: str, code: int = 0) -> str:
    """What the command prints, which must fit."""
    told = surgeon(*words, COLUMNS=width, FORCE_COLOR="1")
    assert told.exit_code == code, told.stderr
    wide = [line for line in lines(told.stdout) if len(line) > int(width)]
    wide = [line for line in wide if not line.startswith("  apply    ckptsurgeon ")]  # stays whole
    assert wide == [], wide
    assert told.stdout.strip()
    return told.stdout


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_fits_into_the_terminal(surgeon: Surgeon, here: Path, width: str) -> None:
    cut = ["--set", "lr=5e-4", "--skip", "6900-7010", "--skip", "5", "--keep-tb", "before-it"]
    narrow(surgeon, "rollback", "4", *cut, "--reset", "moments", "--dry-run", width=width)
    narrow(surgeon, "status", width=width)
    narrow(surgeon, "show", width=width)
    narrow(surgeon, "advise", width=width)
    assert surgeon("rollback", "4", *cut, "--why", WHY, "--yes").exit_code == 0
    assert surgeon("set", "beta2=0.99", "--yes").exit_code == 0
    narrow(surgeon, "status", width=width)
    narrow(surgeon, "log", width=width)
    narrow(surgeon, "undo", "0002", "--dry-run", width=width)
    narrow(surgeon, "prune", "--dry-run", width=width)
    narrow(surgeon, "set-lr", "30", "--dry-run", width=width)
    narrow(surgeon, "set", "beta2=0.99", "--dry-run", width=width)


@pytest.mark.parametrize("width", WIDTHS)
def test_trouble_fits_and_its_commands_stay_whole(surgeon: Surgeon, here: Path, width: str) -> None:
    shard = next((here / "global_step8").glob("*optim_states.pt"))
    shutil.copy(shard, here.parent / "whole")
    shard.write_bytes(b"")
    narrow(surgeon, "status", width=width)
    shutil.copy(here.parent / "whole", shard)
    (here / "latest").write_text("global_step99")
    told = lines(narrow(surgeon, "status", width=width))
    assert any("ckptsurgeon repair-latest" in line for line in told)
    assert surgeon("repair-latest", "--yes").exit_code == 0
    run = Run.open(here)

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "editing":
            raise KeyboardInterrupt

    with pytest.raises(InterruptedSurgery):
        plan = surgery.plan(run, Recipe(Hyperparameters(lr=5e-4), why=WHY))
        surgery.apply(run, plan, progress=stop)
    told = lines(narrow(surgeon, "status", width=width))
    assert told[2].split() == ["surgery", "interrupted:", "set", "lr=0.0005", *told[2].split()[4:]]
    assert any(line.endswith("ckptsurgeon recover") for line in told[2:4])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_of_another_trainer_fits(
    surgeon: Surgeon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.chdir(make_run(tmp_path))
    for words in (["status"], ["show"], ["set", "lr=2e-3", "beta1=0.8", "--dry-run"]):
        narrow(surgeon, *words, width=width)


def test_no_command_of_status_is_broken_in_two_where_the_path_is_long(
    surgeon: Surgeon, tmp_path: Path
) -> None:
    root = make_run(tmp_path / "a-name-that-is-long" / ("x" * 60))
    write_log(root / "runs", spiked())
    for change in ("lr=2e-3", "lr=3e-3", "lr=4e-3"):
        assert surgeon("set", change, "--yes", "-C", root).exit_code == 0
    told = hints(surgeon("status", "-C", root).stdout)
    assert [words[:2] for words in told] == [["-C", str(root)]] * 2
    assert [words[2] for words in told] == ["advise", "log"]


def test_a_note_that_does_not_fit_stands_below_its_text() -> None:
    rows = [
        Row("lr", "1.000e-03 → 5.000e-04", "1 place in 1 shard (max_lr)", "~"),
        Row("lr", "9.991e-04 → 4.996e-04", "2 places in 1 shard (lr)", "~"),
    ]
    assert table(rows, Style(60)) == [
        "  lr  ~ 1.000e-03 → 5.000e-04   1 place in 1 shard (max_lr)",
        "      ~ 9.991e-04 → 4.996e-04   2 places in 1 shard (lr)",
    ]
    assert table(rows, Style(40)) == [
        "  lr  ~ 1.000e-03 → 5.000e-04",
        "          1 place in 1 shard (max_lr)",
        "      ~ 9.991e-04 → 4.996e-04",
        "          2 places in 1 shard (lr)",
    ]


def test_a_note_that_is_too_long_for_its_column_begins_left_of_it() -> None:
    rows = [Row("lr", "1.000e-03", "wins"), Row("scale", "1", "wins   optimizer.loss_scaler.cur")]
    assert table(rows, Style(48)) == [
        "  lr     1.000e-03   wins",
        "  scale  1      wins   optimizer.loss_scaler.cur",
    ]


def test_a_command_is_never_broken_and_its_comment_goes_below() -> None:
    hint = "ckptsurgeon -C a/long/way/to/the/run rollback --to 6210    the newest sound step"
    assert table([Row("next", hint)], Style(40)) == [
        "  next  ckptsurgeon -C a/long/way/to/the/run rollback --to 6210",
        "          the newest sound step",
    ]


def test_an_item_that_is_wider_than_the_line_is_continued() -> None:
    assert packed("  uses   ", ["lr 1", "skip 1-2, 5-6, 9-10, 13-14"], Style(24)) == [
        "  uses   lr 1",
        "         skip 1-2, 5-6,",
        "         9-10, 13-14",
    ]


@pytest.mark.parametrize("width", ["50", "60", "80", "100", "140"])
def test_the_places_of_a_step_stand_in_columns(surgeon: Surgeon, here: Path, width: str) -> None:
    """All beside their values, behind each other, or all below them."""
    shown = lines(narrow(surgeon, "show", width=width))
    shown = shown[len(shown) - shown[::-1].index("") :]
    found = [match for line in shown for match in re.finditer(r"(wins|copy)   \d", line)]
    assert len(found) > 8 and len({match.start() for match in found}) == 1


@pytest.mark.parametrize("width", ["60", "70", "80", "90", "100"])
def test_two_places_of_a_field_are_told_apart(surgeon: Surgeon, here: Path, width: str) -> None:
    """By their paths, however narrow: `clip_grad` alone is both the one that wins and its copy."""
    shown = "".join(narrow(surgeon, "show", width=width).split())
    for path in ("0.weight_decay", "1.weight_decay", "state_dict.clip_grad", "args.clip_grad"):
        assert path in shown
