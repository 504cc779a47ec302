"""Logs that no surgery cuts are named by every plan that would cut logs, and stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run

FILES = {
    "Aim": ".aim/run_metadata.sqlite",
    "ClearML": "cache/offline/offline-abc/task.json",
    "Comet": ".cometml-runs/abc.zip",
    "DVCLive": "dvclive/metrics.json",
    "Neptune": ".neptune/offline/run__abc/exec-1/data-1.log",
    "SwanLab": "swanlog/run-20260102_030405-abc/backup.swanlab",
}


@pytest.mark.parametrize("tracker", FILES)
def test_logs_of_a_tracker_that_is_not_cut_are_named(tmp_path: Path, tracker: str) -> None:
    root = make_run(tmp_path / "run", (4, 8))
    file = root / FILES[tracker]
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    (file.parent / "plots/metrics").mkdir(parents=True)
    before = snapshot(root)
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}}))
    (said,) = (text for text in plan.warnings if tracker in text)
    assert "stays as it is" in said and FILES[tracker].startswith(said.partition("/ ")[0])
    alone = surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}, "tensorboard": {
        "truncate": False}}))  # fmt: skip
    assert not [text for text in alone.warnings if tracker in text]
    surgery.apply(Run.open(root), plan)
    assert snapshot(root)[FILES[tracker]] == before[FILES[tracker]]


def test_a_folder_of_the_same_name_without_logs_is_not(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", (4, 8))
    (root / ".aim").mkdir()
    (root / "plots").mkdir()
    (root / "metrics.json").write_text("{}")
    (root / "offline-data").mkdir()
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}}))
    assert not [text for text in plan.warnings if "has logs of" in text]


def test_a_file_that_is_only_called_like_a_log_is_named(tmp_path: Path) -> None:
    """ClearML's `metrics.jsonl` has lists in its lines."""
    root = make_run(tmp_path / "run", (4, 8))
    (root / "metrics.jsonl").write_text('[{"metric": "loss", "iter": 1, "value": 2.0}]\n' * 3)
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}}))
    assert [text for text in plan.warnings if text.startswith("metrics.jsonl stays as it is")]
    (root / "metrics.jsonl").write_text("")
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}}))
    assert not [text for text in plan.warnings if "stays as it is" in text]


def test_what_is_left_is_told_in_words_of_its_kind(tmp_path: Path) -> None:
    """Where the command has no option that leaves the logs alone."""
    from ckptsurgeon import hints
    from tests.support.wandb_files import write_run

    root = make_run(tmp_path / "run", (4, 8))
    log = write_run(root, range(1, 9))
    data = bytearray(log.read_bytes())
    data[40] ^= 0xFF
    log.write_bytes(data)
    typed = hints.TYPED.set(hints.Typed(("truncate-logs",), takes=lambda option: False))
    try:
        with pytest.raises(SurgeryError) as caught:
            surgery.plan(Run.open(root), from_data({"logs": {"after": 4}}))
        (said,) = caught.value.next
        assert str(caught.value.hints[0]) == said.partition("    ")[0]
    finally:
        hints.TYPED.reset(typed)
    assert said.startswith(f"move {log.parent} out of the run's log folders")
    assert said.endswith("its records stay as they are")
