"""The lines and points that torchtitan, OLMo-core and Lightning themselves write."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.logs.printed import lightning as grammar
from ckptsurgeon.logs.printed import points
from ckptsurgeon.logs.printed.comparison import Comparison
from ckptsurgeon.logs.printed.families import FAMILIES, Listener
from ckptsurgeon.look.listen import listen
from ckptsurgeon.recipe.file import from_data

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]


def printed(logger: logging.Logger, act: Any) -> list[str]:
    """The lines of the messages that `act` logs."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(record.getMessage().splitlines())

    keep, level = Keep(logging.INFO), logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        act()
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)
    return lines


# --- torchtitan ----------------------------------------------------------------------------------


class Titan:
    """torchtitan's own containers of optimizers and schedulers and its own metrics; the loop and
    the two keys of the train state are as in its trainer."""

    def __init__(self, lr: float, logs: Path) -> None:
        from torchtitan.components import metrics
        from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
        from torchtitan.components.optimizer.optimizer import default_adamw
        from torchtitan.tools.utils import Color

        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        config = default_adamw(lr=lr)
        config.implementation = "for-loop"
        self.optimizers = config.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=20)
        self.step = 0
        self.metrics = metrics.MetricsProcessor.__new__(metrics.MetricsProcessor)
        memory = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0, max_active_gib=0.0,
                                 max_active_pct=0.0, num_alloc_retries=0, num_ooms=0)  # fmt: skip
        monitor = SimpleNamespace(get_peak_stats=lambda: memory, reset_peak_stats=lambda: None)
        vars(self.metrics).update(
            logger=metrics.TensorBoardLogger(str(logs)), color=Color(), ntokens_since_last_log=8,
            data_loading_times=[0.1], time_last_log=0.0, num_flops_per_token=1, gpu_peak_flops=1.0,
            has_quantization=False, device_memory_monitor=monitor,
            config=metrics.MetricsProcessor.Config(log_freq=1),
            parallel_dims=SimpleNamespace(non_data_parallel_size=1),
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {
            **self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "lr_scheduler": self.schedulers.state_dict(),
            "train_state": {"step": self.step, "ntokens_seen": self.step * 8},
        }

    def save(self, root: Path) -> None:
        dcp.save(self.state(), checkpoint_id=root / f"step-{self.step}", no_dist=True)

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        self.optimizers.load_state_dict(state["optimizer"])
        self.schedulers.load_state_dict(state["lr_scheduler"])
        self.step = state["train_state"]["step"]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            rates = self.schedulers.get_metrics()
            self.optimizers.zero_grad()
            self.model(torch.ones(2, 8)).pow(2).sum().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.metrics.data_loading_times.append(0.1)
            self.metrics.log(self.step, 1.0, 1.0, 0.5, extra_metrics=rates)

    def close(self) -> None:
        self.metrics.logger.close()


def titan(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    first = Titan(1e-3, tmp_path / "first")
    first.train(6)
    first.save(root)
    first.close()
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"set": {"lr": "0.5x"}})))
    return root


def titan_goes_on(tmp_path: Path, root: Path, lr: float) -> tuple[list[str], Comparison]:
    """What it prints, and what it says in TensorBoard."""
    second = Titan(lr, tmp_path / "tb")
    second.load(root / "step-6")
    lines = printed(logging.getLogger(), lambda: second.train(3))
    second.close()
    return lines, listen(Run.open(root), folder=tmp_path / "tb")


@pytest.mark.witness(
    "torchtitan (DCP)",
    "set-lr",
    by="torchtitan",
)
def test_torchtitan_with_the_new_lr_in_its_config_keeps_its_word(tmp_path: Path) -> None:
    root = titan(tmp_path)
    lines, word = titan_goes_on(tmp_path, root, 5e-4)
    assert word.differs == []
    assert word.agrees[0] == "step 7" and word.agrees[1].startswith("lr of update 7: ")
    assert word.not_compared == ["lr of update 8: only the trainer's own config says it"]
    (tmp_path / "out").write_text("\n".join(f"INFO - {line}" for line in lines))
    heard = listen(Run.open(root), log=tmp_path / "out")
    assert (heard.agrees, heard.differs) == (["step 7"], [])


def test_torchtitan_with_the_old_lr_in_its_config_is_caught(tmp_path: Path) -> None:
    """Its schedule is computed from the config: from the second update on the edit is gone."""
    root = titan(tmp_path)
    _, word = titan_goes_on(tmp_path, root, 1e-3)
    assert word.differs[0].startswith("lr of update 7: promised ")
    assert "lr/AdamW" in word.differs[0]
    assert any("relaunch" in hint or "optimizer.lr" in hint for hint in word.expected.remedy)


@pytest.mark.witness(
    "torchtitan (DCP)", "set betas", "set eps", "set weight_decay", "reset moments",
    by="torchtitan",
)  # fmt: skip
def test_torchtitans_own_containers_hold_what_was_set(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first = Titan(1e-3, tmp_path / "first")
    first.train(6)
    first.save(root)
    first.close()
    values = {"beta1": 0.8, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
    recipe = from_data({"set": values, "reset": ["moments"]})
    run = Run.open(root)
    surgery.apply(run, plan(run, recipe))
    second = Titan(1e-3, tmp_path / "second")
    second.load(root / "step-6")
    second.close()
    for optimizer in second.optimizers:
        for group in optimizer.param_groups:
            assert (group["betas"], group["eps"]) == ((0.8, 0.97), 1e-6)
            assert group["weight_decay"] in (0.0, 0.3)
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                assert state["step"] == 0 and not state["exp_avg"].any()


# --- OLMo-core -----------------------------------------------------------------------------------


@pytest.mark.olmo
def test_olmo_cores_console_is_read(tmp_path: Path) -> None:
    from olmo_core.train.callbacks import console_logger

    progress = SimpleNamespace(time_remaining=None)
    callback = console_logger.ConsoleLoggerCallback()
    callback._trainer = SimpleNamespace(max_steps=100, epoch=1, training_progress=progress)
    rates = {5: 4.0123e-4, 6: 9.5678e-5}

    def act() -> None:
        for step, rate in rates.items():
            metrics = {"train/CE loss": 5.5, "optim/LR (group 0)": rate, "optim/LR (group 1)": 1.0}
            callback.log_metrics(step, metrics)

    listener = Listener(FAMILIES["olmo-core"])
    heard = [s for line in printed(console_logger.log, act) for s in listener.feed(line)]
    assert [statement.step for statement in heard] == [5, 6]
    for statement in heard:
        assert statement.step is not None and statement.lr is not None
        assert statement.lr.agrees(rates[statement.step])
        assert not statement.lr.agrees(rates[statement.step] * 1.3)


# --- Lightning -----------------------------------------------------------------------------------


def test_lightnings_rows_and_points_are_the_rates_of_its_updates(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    used: dict[int, float] = {}

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            used[self.trainer.global_step + 1] = self.trainer.optimizers[0].param_groups[0]["lr"]
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            adam = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 50)
            return {
                "optimizer": adam,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    loggers = [CSVLogger(str(tmp_path), name="csv"), TensorBoardLogger(str(tmp_path), name="tb")]
    trainer = lightning.Trainer(
        max_steps=6, logger=loggers, log_every_n_steps=1, accelerator="cpu",
        callbacks=[LearningRateMonitor("step")], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4))
    assert sorted(used) == [1, 2, 3, 4, 5, 6]
    for logger in loggers:
        heard = list(points.in_folder(Path(logger.log_dir), FAMILIES["lightning"]))
        assert {s.family for s in heard} == {grammar.NAME}
        said = {s.step: s.lr.value for s in heard if s.lr is not None}
        assert said.keys() == used.keys()
        assert all(math.isclose(said[step], rate, rel_tol=1e-7) for step, rate in used.items())
