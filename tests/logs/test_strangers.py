"""Logs that no surgery cuts are named by every plan that would cut logs, and stay as they are."""

from __future__ import annotations

import json
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


N = range(1, 25)
LOGS = {
    "training.log": "epoch,accuracy,loss\n" + "".join(f"{n - 1},0.5,2.5\n" for n in N),
    "log.txt": "".join(f'{{"train_lr": 1e-3, "train_loss": 2.5, "epoch": {n - 1}}}\n' for n in N),
    "history.csv": "epoch,train_loss,time\n" + "".join(f"{n - 1},2.5,00:05\n" for n in N),
    "results.csv": "    epoch,  train/box_loss\n" + "".join(f"    {n},    2.5\n" for n in N),
    "Log.csv": "Epoch,Loss\n" + "".join(f"{n},2.5\n" for n in N),
    "vis_data/scalars.json": "".join(f'{{"loss": 2.5, "iter": {n}, "step": {n}}}\n' for n in N),
    "run.jsonl": "".join(f'{{"step": {n}, "data": {{"loss": 2.5}}}}\n' for n in N),
    "stats.ndjson": "".join(f'{{"step": {n}, "loss": 2.5}}\n' for n in N),
    "train.tsv": "step\tloss\n" + "".join(f"{n}\t2.5\n" for n in N),
    "logs/version_0/metrics.csv": "step,loss\n" + "".join(f"{n},2.5\n" for n in N),
    "progress.csv": "loss/train,time/total\n" + "".join(f"2.5,{n}\n" for n in N),
    "runs/1/metrics.json": json.dumps({"loss": {"steps": [*N], "values": [2.5 for _ in N]}}),
    "metrics.json": json.dumps([{"step": n, "loss": 2.5} for n in N]),
    "trainer_state.json": json.dumps({"log_history": [{"step": n} for n in N]}, indent=2),
    "nested.jsonl": "".join(f'{{"train": {{"step": {n}, "loss": 2.5}}}}\n' for n in N),
}
"""Logs as Keras, DETR, fastai, YOLOv5, MMEngine, verl, Lightning, Stable Baselines, Sacred and the
Hugging Face Trainer write them, and some of nobody in particular."""


@pytest.mark.parametrize("name", LOGS)
def test_no_log_of_a_stranger_stays_in_silence(tmp_path: Path, name: str) -> None:
    """It is cut or named; where the settings name it, as the plan says, it is cut, or the plan says
    why not."""
    root = make_run(tmp_path / "run", (12, 24))
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(LOGS[name])
    wanted = from_data({"rollback": {"to": 12}})
    plan = surgery.plan(Run.open(root), wanted)
    said = [text for text in plan.warnings if text.startswith(f"{name} stays as it is")]
    assert bool(said) is not any(change.file == name for change in plan.changes)
    if not said or "no surgery cuts it" in said[0]:
        return
    (root / "ckptsurgeon.yaml").write_text(said[0].rpartition("ckptsurgeon.yaml: ")[2] + "\n")
    plan = surgery.plan(Run.open(root), wanted)
    cut = any(change.file == name for change in plan.changes)
    assert cut is not any(name in text and "not known" in text for text in plan.warnings)
    before = file.read_text()
    surgery.apply(Run.open(root), plan)
    assert (file.read_text() == before) is not cut


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.log", "2026-01-01 12:00:00.000 | INFO | __main__:1 - step 1, loss 2.5, lr 1e-3\n"),
        ("bar.log", "\rEpoch 1:  10%|#  | 1/24 [00:01<00:10, 2.0it/s, loss=2.5]"),
        ("words.txt", "a loss, another loss\n1, 2\n2, 3\n"),
        ("config.json", json.dumps({"optimizer": {"step": 1}, "name": "loss"}, indent=2)),
        ("table.csv", "question,answer\n1,2\n2,3\n"),
    ],
)
def test_lines_that_were_printed_and_other_files_are_no_logs(
    tmp_path: Path, name: str, text: str
) -> None:
    root = make_run(tmp_path / "run", (12, 24))
    (root / name).write_text(text * 3)
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 12}}))
    assert not [text for text in plan.warnings if name in text]
