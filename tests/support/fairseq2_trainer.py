"""fairseq2's own Trainer on CPUs: one process, or two with its FSDP2. As a program it prints what
each update used.

Usage: python -m tests.support.fairseq2_trainer FOLDER UPDATES [--schedule NAME] [--lr PEAK] …
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.support.fairseq2_package import package

sys.path.append(str(package()))

import fairseq2.recipe  # noqa: F401  # before the rest: its modules import one another
from fairseq2.checkpoint import NOOP_HG_EXPORTER, StandardCheckpointManager
from fairseq2.datasets import DataReader
from fairseq2.early_stopper import NOOP_EARLY_STOPPER
from fairseq2.file_system import NativeLocalFileSystem
from fairseq2.gang import (
    ProcessGroupGang,
    create_fake_gangs,
    create_fsdp_gangs,
    create_parallel_gangs,
)
from fairseq2.io import _TorchTensorFileDumper, _TorchTensorFileLoader
from fairseq2.metrics import Mean
from fairseq2.metrics.recorders import (
    CompositeMetricRecorder,
    JsonlMetricRecorder,
    LogMetricRecorder,
    MetricDescriptorRegistry,
    TensorBoardRecorder,
)
from fairseq2.nn.fsdp import to_fsdp2
from fairseq2.optim.fp16_loss_scaler import NOOP_FP16_LOSS_SCALER
from fairseq2.optim.lr_schedulers import (
    CosineAnnealingLR,
    MyleLR,
    NoamLR,
    PolynomialDecayLR,
    TriStageLR,
)
from fairseq2.profilers import NOOP_PROFILER
from fairseq2.recipe.composition.metric_recorders import _register_metric_descriptors
from fairseq2.runtime.dependency import DependencyContainer
from fairseq2.trainer import Trainer, TrainUnit
from fairseq2.utils.device_stat import NOOP_DEVICE_STAT_TRACKER
from fairseq2.utils.gc import NOOP_GARBAGE_COLLECTOR
from fairseq2.utils.progress import NOOP_PROGRESS_REPORTER
from fairseq2.utils.stopwatch import Stopwatch
from fairseq2.utils.threading import _StandardThreadPool
from fairseq2.validator import NOOP_VALIDATOR

CPU = torch.device("cpu")
EVERY, PEAK = 2, 1e-3


def schedule_of(name: str, adam: Any, warmup: int, end: int, floor: float) -> Any:
    """One of its schedulers by name."""
    if name == "cosine":
        return CosineAnnealingLR(adam, end - warmup, warmup, start_lr=1e-6, final_lr=floor)
    if name == "cycles":
        grows = {"cycle_mul": 1.5, "lr_mul": 0.5}
        return CosineAnnealingLR(adam, end - warmup, warmup, final_lr=floor, **grows)
    if name == "polynomial":
        rates = {"start_lr": 1e-6, "final_lr": floor}
        return PolynomialDecayLR(adam, end, warmup, power=2.0, **rates)
    if name == "myle":
        return MyleLR(adam, warmup, start_lr=1e-6)
    if name == "noam":
        return NoamLR(adam, warmup)
    return TriStageLR(adam, end, (0.15, 0.1, 0.75))


def _recorders(folder: Path, files: Any) -> Any:
    """Those of its recipes: lines in `logs/rank_0.log`, TensorBoard, and JSON lines."""
    log = folder / "logs" / "rank_0.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log)
    words = "[Rank 0] %(asctime)s %(levelname)s %(name)s - %(message)s"
    handler.setFormatter(logging.Formatter(words, "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    container = DependencyContainer()
    _register_metric_descriptors(container)
    names = container.resolve(MetricDescriptorRegistry)
    return CompositeMetricRecorder(
        [
            LogMetricRecorder(names),
            TensorBoardRecorder(folder, names),
            JsonlMetricRecorder(folder, files, names),
        ]
    )


def _sum(tensor: Any) -> float:
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return float(own.abs().sum())


def train(folder: Path, updates: int, peak: float, name: str, *more: Any) -> dict[int, Any]:
    """Resume what lies in the folder, and train on: what each update used."""
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    )
    gangs = create_fake_gangs(CPU)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        root = ProcessGroupGang.create_default_process_group(CPU)
        gangs = create_fsdp_gangs(create_parallel_gangs(root))
        model = to_fsdp2(model, gangs, lambda module, wrap: module)
    decayed = [each for each in model.parameters() if each.ndim > 1]
    plain = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = schedule_of(name, adam, *more)
    said: dict[int, Any] = {}

    class Unit(TrainUnit[torch.Tensor]):
        step = 0

        def prepare_metric_bag(self, metric_bag: Any) -> None:
            metric_bag.add("nll_loss", Mean())

        def set_step_nr(self, step_nr: int) -> None:
            self.step = step_nr

        def process_batch(self, batch: torch.Tensor, metric_bag: Any) -> tuple[Any, None]:
            first = next(iter(adam.state.values()), {})
            loss = model(batch).square().mean()
            said[self.step] = {
                "lr": [group["lr"] for group in adam.param_groups],
                "betas": adam.param_groups[0]["betas"],
                "eps": adam.param_groups[0]["eps"],
                "weight_decay": [group["weight_decay"] for group in adam.param_groups],
                "adam_step": float(first.get("step", 0)),
                "moment": _sum(first["exp_avg"]) if first else 0.0,
                "loss": float(loss.detach()),
            }
            metric_bag.get("nll_loss", Mean).update(loss.detach())
            return loss, None

    class Batches(DataReader[torch.Tensor]):
        read = 0
        num_accumulate = 1

        def __iter__(self) -> Batches:
            return self

        def __next__(self) -> list[torch.Tensor]:
            self.read += 1
            made = torch.Generator().manual_seed(self.read)
            return [torch.randn(4, 8, generator=made)]

        def reset(self) -> None:
            self.read = 0

        def state_dict(self) -> dict[str, object]:
            return {"read": self.read}

        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            self.read = state_dict["read"]  # type: ignore[assignment]

    files, pool = NativeLocalFileSystem(), _StandardThreadPool(1)
    loader, dumper = _TorchTensorFileLoader(files), _TorchTensorFileDumper(files)
    trainer = Trainer(
        model=model,
        unit=Unit(),
        data_reader=Batches(),
        gangs=gangs,
        amp=False,
        amp_dtype=torch.float32,
        optimizer=adam,
        lr_scheduler=schedule,
        fp16_loss_scaler=NOOP_FP16_LOSS_SCALER,
        validator=NOOP_VALIDATOR,
        early_stopper=NOOP_EARLY_STOPPER,
        checkpoint_manager=StandardCheckpointManager(folder, gangs, files, loader, dumper, pool),
        hg_exporter=NOOP_HG_EXPORTER,
        metric_recorder=_recorders(folder, files),
        garbage_collector=NOOP_GARBAGE_COLLECTOR,
        profiler=NOOP_PROFILER,
        device_stat_tracker=NOOP_DEVICE_STAT_TRACKER,
        wall_watch=Stopwatch(),
        progress_reporter=NOOP_PROGRESS_REPORTER,
        seed=1,
        max_num_steps=updates,
        checkpoint_every_n_steps=EVERY,
        publish_metrics_every_n_steps=1,
    )
    trainer.run()
    return said


def main() -> None:
    """Train as the command line says."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("updates", type=int)
    parser.add_argument("--schedule", default="cosine")
    parser.add_argument("--lr", type=float, default=PEAK)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--decay", type=int, default=20)
    parser.add_argument("--min_lr", type=float, default=1e-5)
    given = parser.parse_args()
    schedule = given.schedule, given.warmup, given.decay, given.min_lr
    said = train(given.folder, given.updates, given.lr, *schedule)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(said))


if __name__ == "__main__":
    main()
