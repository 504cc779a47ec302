"""Whose word is heard: of logs that the trainer wrote, and of a known trainer by its own lines."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look.listen import listen
from tests.support.described_runs import mmengine
from tests.support.event_logs import write_log
from tests.support.lightning_files import lightning
from tests.support.surgeries import operate
from tests.support.tiny_run import make_run


def test_what_an_attic_keeps_is_no_word_of_the_trainer(tmp_path: Path) -> None:
    """The log that a rollback cut lies whole in the attic beside it, with the old rates."""
    root, table = tmp_path / "checkpoints", tmp_path / "csv" / "version_0" / "metrics.csv"
    for step in (2, 4):
        lightning(root, step, torch.zeros(1))
    table.parent.mkdir(parents=True)
    table.write_text("lr-AdamW,step\n" + "".join(f"1e-3,{step}\n" for step in range(4)))
    operate(root, {"rollback": {"to": 2}, "set": {"lr": 5e-4}})
    assert [*tmp_path.glob(".ckptsurgeon/attic/*/csv/version_0/metrics.csv")]
    table.write_text(table.read_text() + "5e-4,2\n5e-4,3\n")
    word = listen(Run.open(root), folder=tmp_path)
    assert word.differs == []
    assert "lr of update 3: 5e-4" in word.agrees


def test_lines_of_json_are_read_whatever_the_file_is_called(tmp_path: Path) -> None:
    """As MMEngine's `vis_data/scalars.json`."""
    root = mmengine(tmp_path / "run")
    log = tmp_path / "scalars.json"
    rows = [json.dumps({"lr": 1e-3, "loss": 5.5, "iter": n, "step": n}) for n in (7, 8)]
    log.write_text("\n".join([*rows, '{"acc": 0.5, "step": 2}', ""]))
    word = listen(Run.open(root), log=log)
    assert word.differs == [] and word.agrees[:2] == ["step 7", "lr of update 7: 0.001"]


def test_a_trainer_that_is_known_is_read_by_its_own_numbers(tmp_path: Path) -> None:
    """A start of which a single update was logged, that of the newest step, begins at its number,
    as a loop of one's own does that counts from 0."""
    root = make_run(tmp_path / "run", (4, 8))
    write_log(root / "runs", [2e-3], first=8, tag="train/learning_rate", wall=time.time())
    with pytest.raises(SurgeryError, match="nothing in it is of an update after step 8"):
        listen(Run.open(root), folder=root / "runs")
