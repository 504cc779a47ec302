"""Cooldowns whose shape is on a command line: the real library's schedule at those options."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.support import megatron_legacy
from tests.support.dcp_trainers import resumed_titan, torchtitan
from tests.support.megatron_legacy import megatron_enums

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler")

LEFT = {
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


def closed(rate: float, to: float, shape: str, steps: int) -> list[float]:
    """The rates of the next `steps` updates."""
    return [to + (rate - to) * LEFT[shape](k / steps) for k in range(steps)]


def same(found: list[float], wanted: list[float]) -> None:
    assert len(found) == len(wanted)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 1e-12 * wanted[0]


def cooled(root: Path, **wanted: Any) -> Plan:
    made = plan(Run.open(root), from_data({"cooldown": wanted}))
    surgery.apply(Run.open(root), made)
    assert look.verify(Run.open(root), level=4).findings == ()
    return made


@pytest.mark.parametrize("shape", LEFT)
def test_transformers(tmp_path: Path, shape: str) -> None:
    """The Trainer's own get_scheduler, from the edited base rate."""
    from transformers.optimization import get_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 100)
    for _ in range(40):
        optimizer.step()
        schedule.step()
    folder = tmp_path / "checkpoint-40"
    folder.mkdir()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 40}))
    rate = optimizer.param_groups[0]["lr"]
    words = cooled(tmp_path, steps=8, shape=shape, to=1e-6).warnings[-1]
    line = words.removeprefix("relaunch with ").removesuffix(
        ": the shape of the decay is in no checkpoint"
    )
    parts = shlex.split(line)
    given = dict(zip(parts[::2], parts[1::2], strict=True))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
    schedule = get_scheduler(
        given["--lr_scheduler_type"], optimizer, int(given["--warmup_steps"]),
        int(given["--max_steps"]), json.loads(given["--lr_scheduler_kwargs"]),
    )  # fmt: skip
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=False))
    schedule.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=False))
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    same(rates, [*closed(rate, 1e-6, shape, 8), 1e-6])
    with pytest.raises(SurgeryError, match="in the Trainer's arguments") as error:
        plan(Run.open(tmp_path), from_data({"cooldown": {"steps": 8, "shape": shape, "to": 1e-6}}))
    assert line in error.value.next[0]


@pytest.mark.parametrize("shape", LEFT)
def test_torchtitan(tmp_path: Path, shape: str) -> None:
    """Its own lambda at the options of the plan, in the LambdaLR that loads the edited state."""
    pytest.importorskip("torchtitan")
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    root = torchtitan(tmp_path / "run")
    rate = resumed_titan(root).optimizer.param_groups[0]["lr"]
    words = cooled(root, steps=4, shape=shape, to=1e-6).warnings[-1]
    found = dict(re.findall(r"--([\w.]+) ([^\s:]+)", words))
    config = LRSchedulersContainer.Config(
        warmup_steps=int(found["lr_scheduler.warmup_steps"]),
        decay_ratio=float(found["lr_scheduler.decay_ratio"]),
        decay_type=found["lr_scheduler.decay_type"],
        min_lr_factor=float(found["lr_scheduler.min_lr_factor"]),
    )
    trainer = resumed_titan(root)
    state = trainer.schedule.state_dict()
    built = config.build(
        optimizers=[trainer.optimizer], training_steps=int(found["training.steps"])
    )
    (schedule,) = built.schedulers
    schedule.load_state_dict({**state, "lr_lambdas": schedule.state_dict()["lr_lambdas"]})
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    rates = []
    for _ in range(4):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        schedule.step()
    same(rates, closed(rate, 1e-6, shape, 4))


@pytest.mark.parametrize("shape", LEFT)
@pytest.mark.parametrize("unit", ["samples", "iters"])
def test_megatron_core(tmp_path: Path, shape: str, unit: str) -> None:
    """OptimizerParamScheduler, from the edited state and the flags of the plan."""
    size = megatron_legacy.BATCH
    more: dict[str, Any] = {"lr_wsd_decay_style": None, "lr_wsd_decay_iters": None}
    more |= {"lr_wsd_decay_samples": None, "train_samples": None}
    if unit == "iters":
        more |= {"lr_warmup_samples": 0, "lr_decay_samples": None, "lr_warmup_fraction": None}
        more |= {"lr_warmup_iters": 10, "lr_decay_iters": 1000, "train_iters": 1000}
    root = megatron_legacy.save(tmp_path / "run", **more)
    rate = look.inspect(Run.open(root)).promise.lr
    assert rate is not None
    words = " ".join(cooled(root, steps=10, shape=shape, to=1e-7).warnings)
    with megatron_enums():
        file = next((root / "iter_0000030").glob("*/model_optim_rng.pt"))
        saved = torch.load(file, weights_only=False)
    state, group = saved["opt_param_scheduler"], saved["optimizer"]["optimizer"]["param_groups"][0]
    wsd: dict[str, Any] = {"wsd_decay_steps": None, "lr_wsd_decay_style": None}
    if shape == "1-sqrt":
        flags = dict(re.findall(r"--([\w-]+) ([^\s:]+)", words))
        count = int(flags[f"lr-wsd-decay-{unit}"]) * (size if unit == "iters" else 1)
        wsd = {"wsd_decay_steps": count, "lr_wsd_decay_style": flags["lr-wsd-decay-style"]}

    class Optimizer:
        param_groups = [group]  # noqa: RUF012

    scheduler = megatron.OptimizerParamScheduler(
        Optimizer(), init_lr=0.0, max_lr=state["max_lr"], min_lr=state["min_lr"],
        lr_warmup_steps=state["lr_warmup_steps"], lr_decay_steps=state["lr_decay_steps"],
        lr_decay_style=state["lr_decay_style"], start_wd=state["start_wd"],
        end_wd=state["end_wd"], wd_incr_steps=state["wd_incr_steps"],
        wd_incr_style=state["wd_incr_style"], **wsd,
    )  # fmt: skip
    scheduler.load_state_dict(state)
    rates = []
    for _ in range(11):
        rates.append(group["lr"])
        scheduler.step(size)
    same(rates, [*closed(rate, 1e-7, shape, 10), 1e-7])
