"""Logs beside a run, and those that its page names there: they are cut or named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.event_logs import write_log
from tests.support.own_runs import BEGAN, saved
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate

PAGE = """name: own
files:
  "ckpt-{step}.pt": {optimizers: [[optimizer]]}
"""
PAGED = (
    PAGE
    + """logs: {checkpoints: ".."}
log_files: ["metrics/*.jsonl", "metrics/*/*.jsonl"]
"""
)
STEPS = [6, 12, 18, 24]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "out" / "checkpoints"
    saved(root, {n: n for n in STEPS}, PAGE, times={n: BEGAN + n for n in STEPS})
    return root


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics/train.jsonl", '{"step": 24}\n'),
        ("wandb/offline-run-20260101_000000-abc/run-abc.wandb", ""),
        ("logs/version_0/metrics.csv", "step,loss\n24,2.0\n"),
        ("tb/train/events.out.tfevents.1.host", ""),
        ("../logs/checkpoints/metrics.csv", "step,loss\n24,2.0\n"),
        ("dvclive/plots/metrics/loss.tsv", "step\tloss\n24\t2.0\n"),
        ("metrics.csv", "step,loss\n24,2.0\n"),
    ],
)
@pytest.mark.parametrize("since", [True, False])
def test_what_was_written_beside_it_since_the_step_is_named(
    root: Path, name: str, text: str, since: bool
) -> None:
    """What ended before may be any other run's."""
    log = root.parent / name
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(text)
    os.utime(log, (BEGAN + (20 if since else 1),) * 2)
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 12}}))
    folder = "../logs/checkpoints/" if name.startswith("../logs") else name.partition("/")[0]
    said = [each for each in plan.warnings if each.startswith(f"../{folder}")]
    assert len(said) == since
    assert all("stays as it is" in each and "tensorboard: [., .." in each for each in said)


def test_what_the_plan_says_makes_it_a_log(root: Path) -> None:
    write_log(root.parent / "tb", [2.0] * 24, tag="criterion", wall=BEGAN)
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 12}}))
    (said,) = [each for each in plan.warnings if "../tb/" in each]
    with (root / "ckptsurgeon.yaml").open("a") as file:
        file.write(said.rpartition("ckptsurgeon.yaml: ")[2] + "\n")
    plan = operate(root, {"rollback": {"to": 12}})
    assert [change for change in plan.changes if change.file.startswith("../tb/")]
    assert not [each for each in plan.warnings if "../tb/" in each]


def test_files_that_the_page_names_are_cut_and_brought_back(root: Path) -> None:
    """As those of fairseq2. What a cut keeps of them is no log of the run."""
    (root / "own.yaml").write_text(PAGED)
    lines = [
        json.dumps({"Time": "2026-01-01", "Step": n, "Loss": 2.0}) + "\n" for n in range(1, 25)
    ]
    files = [root.parent / "metrics" / name for name in ("train.jsonl", "valid/a.jsonl")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(lines))
    before = snapshot(root.parent)
    for id in ("0001", "0003"):
        operate(root, {"rollback": {"to": 12}})
        for file in files:
            assert file.read_text() == "".join(lines[:12])
            assert (file.parent / f"cut-{id}" / file.name).read_text() == "".join(lines[12:])
        assert {each.path for each in Run.open(root).log_sources()} == {*files}
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert snapshot(root.parent) == before


def test_a_name_that_is_no_logs_outside_of_the_run_is_said(root: Path) -> None:
    """Also where the page or the settings lead to its folder."""
    (root / "own.yaml").write_text(PAGED.replace("metrics/*.jsonl", "lines/*.jsonl"))
    other = root.parent / "lines" / "train.jsonl"
    other.parent.mkdir()
    other.write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 25)))
    plan = operate(root, {"rollback": {"to": 12}})
    (said,) = [each for each in plan.warnings if "../lines/train.jsonl" in each]
    assert "outside of a run only logs with these names are edited: metrics.csv" in said
    assert len(other.read_text().splitlines()) == 24
