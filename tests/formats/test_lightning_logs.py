"""Lightning's own loggers: what a rollback leaves of them, and what a resumed Trainer adds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]


def fit(root: Path, version: int, resume: Path | None = None) -> Path:
    """The folder that a real Trainer logs to, by CSV and TensorBoard; it saves every 2
    of 8 steps."""
    import lightning
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch).pow(2).mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.layer(batch).pow(2).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    data = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    loggers = [
        CSVLogger(root, version=version, flush_logs_every_n_steps=1),
        TensorBoardLogger(root, version=version),
    ]
    trainer = lightning.Trainer(
        max_steps=8, accelerator="cpu", logger=loggers, log_every_n_steps=1,
        val_check_interval=2, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, save_last=True),
            LearningRateMonitor("step"),
        ],
    )  # fmt: skip
    trainer.fit(Module(), loader, loader, ckpt_path=str(resume) if resume else None)
    return Path(loggers[0].log_dir)


def rows(folder: Path, column: str) -> list[int]:
    """The steps of the rows that have a number in this column, by `csv`."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row[column]]


def points(folder: Path, tag: str) -> list[int]:
    """The steps of a tag, by TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder))
    log.Reload()
    return [event.step for event in log.Scalars(tag)]


def test_a_rollback_leaves_the_points_of_the_updates_that_were_made(tmp_path: Path) -> None:
    """Update N is logged at step N - 1, and the rate of the next one at N: a checkpoint of step 4
    has the updates that are logged at 0 to 3."""
    folder = fit(tmp_path, 0)
    run = folder / "checkpoints"
    assert rows(folder, "train_loss") == points(folder, "train_loss") == list(range(8))
    before = snapshot(folder)
    plan = surgery.plan(Run.open(run), from_data({"rollback": {"to": 4}}))
    surgery.apply(Run.open(run), plan)
    for column in ("train_loss", "lr-AdamW"):
        assert rows(folder, column) == points(folder, column) == list(range(4))
    assert rows(folder, "val_loss") == points(folder, "val_loss") == [1, 3]
    later = fit(tmp_path, 1, resume=run / "last.ckpt")
    for column in ("train_loss", "lr-AdamW"):
        assert rows(later, column) == points(later, column) == list(range(4, 8))
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(folder) == before
