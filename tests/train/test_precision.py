"""A run goes on in another dtype: its masters are the truth, the loss scale is not carried over.

OPT and the 104B runs asked for it: "run everything in fp32 from before 4.7K".
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data
from tests.support.in_process import TINY, InProcess
from tests.support.trained_run import step_back
from train import trainer
from train.config import load_config
from train.optimizer import live_adam_step, live_loss_scale, live_optimizer
from train.trainer import differences
from train.universal import convert

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def saved_masters(checkpoint: Path, stage: int, dtype: str) -> list[Tensor]:
    """One flat tensor for each param group, as the files have them."""
    if stage:
        (file,) = checkpoint.glob("*optim_states.pt")
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        flat = state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        return [p.detach() for p in flat]
    state = torch.load(checkpoint / "mp_rank_00_model_states.pt", weights_only=False)
    if dtype == "fp32":
        return by_group(state["module"].values())
    return [flattened(group) for group in state["optimizer"]["fp32_groups"]]


def live_masters(engine: Any) -> list[Tensor]:
    """The same of the engine: what its next step changes."""
    inner = live_optimizer(engine)
    if engine.zero_optimization_stage() == 3:  # its param groups are empty between the steps
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [flattened(group["params"]) for group in inner.param_groups]


def live_weights(engine: Any) -> list[Tensor]:
    """The same of the weights that the next forward pass uses."""
    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        return by_group(parameters)
    with GatheredParameters(parameters):
        return by_group(parameters)


def by_group(parameters: Iterable[Tensor]) -> list[Tensor]:
    known = list(parameters)
    return [flattened(p for p in known if (p.ndim >= 2) == wide) for wide in (True, False)]


def flattened(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in parameters])


def moments(engine: Any) -> list[Tensor]:
    states = live_optimizer(engine).state.values()
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


CHANGES = [("fp16", "fp32"), ("fp16", "bf16"), ("fp32", "bf16"), ("bf16", "fp16")]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("stage", "before", "after", "sums"),
    [
        *((stage, *change, "auto") for stage in (0, 1, 2) for change in CHANGES),
        *((3, *change, "auto") for change in CHANGES[::2]),
        *((stage, "bf16", "fp32", "auto") for stage in (0, 1, 3)),
        # Another wrapper has them add up in bf16, with files of its own.
        (1, "bf16", "fp16", "bf16"), (2, "bf16", "fp16", "bf16"), (1, "fp16", "bf16", "bf16"),
    ],
)  # fmt: skip
@pytest.mark.long
def test_the_masters_of_a_checkpoint_are_the_weights_in_another_dtype(
    in_process: InProcess, tmp_path: Path, before: str, after: str, stage: int, sums: str
) -> None:
    run, words = tmp_path / "run", [f"zero_stage={stage}", "lr_warmup_samples=0"]
    first = [*words, "train_iters=4", f"dtype={before}"]
    then = [*words, f"dtype={after}"]
    if "bf16" in (before, after):
        (first if before == "bf16" else then).append(f"grad_accum_dtype={sums}")
    in_process.train(run, *first)
    saved = saved_masters(run / "global_step4", stage, before)
    same = in_process.prepare(run, *first)
    resumed = in_process.prepare(run, *then, "train_iters=4")
    engine, dtype = resumed.engine, DTYPES[after]
    assert all(map(torch.equal, live_masters(engine), saved))
    assert all(map(torch.equal, moments(engine), moments(same.engine)))
    assert live_adam_step(engine) == live_adam_step(same.engine) > 0
    for weights, master in zip(live_weights(engine), saved, strict=True):
        assert weights.dtype == dtype
        assert torch.equal(weights, master[: len(weights)].to(dtype))
    assert live_loss_scale(engine) == (65536.0 if after == "fp16" else 1.0)
    assert f"dtype: config {after}, checkpoint {before}: the config wins" in differences(resumed)
    later = in_process.train(run, *then)
    assert sorted(later) == [5, 6]
    control = in_process.prepare(run, *words, f"dtype={after}")  # now of its own dtype
    assert live_adam_step(control.engine) == live_adam_step(engine) + 2
    step_back(run, 4)
    unchanged = in_process.train(run, *first, "train_iters=6")
    for iteration in (5, 6):
        assert float(later[iteration]) == pytest.approx(float(unchanged[iteration]), rel=2e-3)


@pytest.mark.parametrize(
    ("stage", "before", "after"),
    [(0, "fp16", "fp32"), (3, "fp16", "bf16"), (0, "bf16", "fp32"), (1, "bf16", "fp32"),
     (3, "bf16", "fp32")],
)  # fmt: skip
@pytest.mark.long
def test_a_surgery_holds_in_another_dtype(
    in_process: InProcess, tmp_path: Path, stage: int, before: str, after: str
) -> None:
    """All but the loss scale, of which a trainer without one says so."""
    run, words = tmp_path / "run", [f"zero_stage={stage}", "train_iters=4", "save_interval=2"]
    in_process.train(run, *words, f"dtype={before}")
    recipe = {"rollback": {"to": 2}, "reset": ["moments"], "set": {"lr": 5e-4, "clip_grad": 0.5}}
    wanted = plan(Run.open(run), from_data(recipe))
    assert wanted.promise is not None
    surgery.apply(Run.open(run), wanted)
    line = in_process.resumed_line(run, *words, f"dtype={after}")
    lost = ["loss_scale: promised 65536.0, uses 1.0"] if before == "fp16" else []
    assert compare(wanted.promise, line) == lost
    told = json.loads(line)
    assert (told["step"], told["adam_step"], told["clip_grad"]) == (3, 0, 0.5)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.long
def test_a_universal_checkpoint_is_loaded_in_another_dtype(
    in_process: InProcess, tmp_path: Path, stage: int
) -> None:
    run, words = tmp_path / "run", [f"zero_stage={stage}", "train_iters=2"]
    in_process.train(run, *words, "dtype=fp16")
    paths = [f"save={run}", f"data={in_process.corpus}"]
    config = load_config(TINY, [*paths, *words, "dtype=bf16"])
    wanted = saved_masters(run / "global_step2", stage, "fp16")
    engine = trainer.prepare(config, convert(config), in_process.device).engine
    assert all(map(torch.equal, live_masters(engine), wanted))
    for weights, master in zip(live_weights(engine), wanted, strict=True):
        assert torch.equal(weights, master[: len(weights)].to(torch.bfloat16))
    assert live_loss_scale(engine) == 1.0
