"""NeMo 2's own training step logs through a real Lightning Trainer: update N at step N - 1. That is
why a rollback to N leaves the points below N of its logs."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptsurgeon.formats.described.pages import shipped
from tests.support import library_source

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
FILE = "nemo/lightning/pytorch/strategies/megatron_strategy.py"
STEPS = 6


class OnHost(torch.Tensor):
    """A number that NeMo sends to the GPU, which tests have none of."""

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def on_host(value: Any, **_: Any) -> torch.Tensor:
    return torch.as_tensor(value).as_subclass(OnHost)


class Chunks(list[Any]):
    """What NeMo calls a model: its parts, of which there is one."""

    def training_step(self, batch: Any) -> Any:
        return {"loss": self[0](batch).pow(2).mean()}


def test_an_update_is_logged_at_the_step_before_it(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    own = library_source.taken(
        FILE,
        ["MegatronStrategy.training_step"],
        torch=SimpleNamespace(is_tensor=torch.is_tensor, tensor=on_host),
        MegatronParallel=Chunks,
        override=lambda function: function,
        _strategy_lib=SimpleNamespace(_sync_from_last_pipeline_stage=lambda *_, **__: None),
    )

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.layer.zero_grad_buffer = lambda: None

        def training_step(self, batch: Any, index: int) -> Any:
            strategy = SimpleNamespace(
                lightning_module=self,
                model=Chunks([self.layer]),
                optimizers=[self.optimizers().optimizer],
                trainer=self.trainer,
                precision_plugin=SimpleNamespace(train_step_context=contextlib.nullcontext),
                log_memory_usage=False,
                log_train_loss=True,
            )
            return own.training_step(strategy, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    loader = torch.utils.data.DataLoader(torch.rand(32, 4), batch_size=4)
    loggers = [
        CSVLogger(tmp_path, version=0, flush_logs_every_n_steps=1),
        TensorBoardLogger(tmp_path, version=0),
    ]
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=loggers, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    folder = Path(loggers[0].log_dir)
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [int(row["step"]) for row in csv.DictReader(file) if row["reduced_train_loss"]]
    log = EventAccumulator(str(folder)).Reload()
    points = [event.step for event in log.Scalars("reduced_train_loss")]
    offset = shipped("nemo").log_offset
    assert offset == -1
    assert rows == points == [update + offset for update in range(1, STEPS + 1)]
