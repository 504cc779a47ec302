"""A run goes on in another dtype: its masters are the truth, the loss scale is not carried over.

OPT and the 104B runs asked for it: "run everything in fp32 from before 4.7K".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.in_process import InProcess
from tests.support.trained_run import step_back
from train.errors import TrainError
from train.optimizer import live_adam_step, live_loss_scale, live_optimizer
from train.trainer import differences

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def masters(checkpoint: Path) -> list[Tensor]:
    (file,) = checkpoint.glob("*optim_states.pt")
    state = torch.load(file, weights_only=False)["optimizer_state_dict"]
    return [p.detach() for p in state["single_partition_of_fp32_groups"]]


def moments(engine: Any) -> list[Tensor]:
    states = live_optimizer(engine).state.values()
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("before", "after"), [("fp16", "fp32"), ("fp16", "bf16"), ("fp32", "bf16"), ("bf16", "fp16")]
)
def test_the_masters_of_a_checkpoint_are_the_weights_in_another_dtype(
    in_process: InProcess, tmp_path: Path, before: str, after: str, stage: int
) -> None:
    run, words = tmp_path / "run", [f"zero_stage={stage}", "lr_warmup_samples=0"]
    first = [*words, "train_iters=4", f"dtype={before}"]
    if before == "bf16":
        first.append("grad_accum_dtype=bf16")
    kept = in_process.train(run, *first)
    saved = masters(run / "global_step4")
    same = in_process.prepare(run, *first)
    resumed = in_process.prepare(run, *words, "train_iters=4", f"dtype={after}")
    engine = resumed.engine
    flat = list(engine.optimizer.single_partition_of_fp32_groups)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(flat, saved, strict=True))
    assert all(map(torch.equal, moments(engine), moments(same.engine)))
    assert live_adam_step(engine) == live_adam_step(same.engine) > 0
    dtype = DTYPES[after]
    groups = [[p for p in engine.module.parameters() if (p.ndim >= 2) == wide] for wide in (1, 0)]
    for parameters, master in zip(groups, saved, strict=True):
        weights = torch.cat([p.detach().flatten() for p in parameters])
        assert weights.dtype == dtype
        assert torch.equal(weights, master[: len(weights)].to(dtype))
    assert live_loss_scale(engine) == (65536.0 if after == "fp16" else 1.0)
    assert f"dtype: config {after}, checkpoint {before}: the config wins" in differences(resumed)
    later = in_process.train(run, *words, f"dtype={after}")
    assert sorted(later) == [5, 6]
    control = in_process.prepare(run, *words, f"dtype={after}")  # now of its own dtype
    assert live_adam_step(control.engine) == live_adam_step(engine) + 2
    step_back(run, 4)
    unchanged = in_process.train(run, *words, *first[2:], "train_iters=6")
    for iteration in (5, 6):
        assert float(later[iteration]) == pytest.approx(float(unchanged[iteration]), rel=2e-3)
    assert kept


@pytest.mark.parametrize(
    ("words", "after"),
    [(["zero_stage=0", "dtype=fp16"], "fp32"), (["zero_stage=1", "dtype=bf16"], "fp32"),
     (["zero_stage=3", "dtype=fp16"], "bf16")],
)  # fmt: skip
def test_masters_that_lie_elsewhere_are_refused(
    in_process: InProcess, tmp_path: Path, words: list[str], after: str
) -> None:
    run = tmp_path / "run"
    in_process.train(run, *words, "train_iters=2")
    with pytest.raises(TrainError, match=f"dtype is .*16, the config says {after}"):
        in_process.prepare(run, words[0], f"dtype={after}", "train_iters=2")
