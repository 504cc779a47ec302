"""Gradients of bf16 add up in float32, and a checkpoint is resumed with what it was made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data
from tests.support.in_process import InProcess
from tests.support.trained_run import edit, step_back
from train import batch
from train.config import load_config
from train.errors import TrainError, UsageError

SMALL = ["num_layers=1", "seq_length=8", "micro_batch_size=1", "train_iters=1", "dtype=bf16"]


def accumulated(wrapper: Any) -> list[Tensor]:
    """What the wrapper is about to step with, in float64, a tensor for each param group."""
    if hasattr(wrapper, "fp32_groups_gradients"):
        groups = wrapper.fp32_groups_gradients
    else:
        # Filled in the order of the backward pass.
        groups = [wrapper.averaged_gradients[i] for i in sorted(wrapper.averaged_gradients)]
    return [torch.cat([g.detach().double().flatten() for g in group]) for group in groups]


BOUNDS = {
    "zero_stage=1": (0.0, 1e-5),
    "zero_stage=2": (0.0, 1e-5),
    "zero_stage=1 grad_accum_dtype=bf16": (1e-2, 0.1),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("overrides", BOUNDS)
@pytest.mark.long
def test_the_sum_over_512_micro_batches_loses_nothing(
    in_process: InProcess, tmp_path: Path, overrides: str
) -> None:
    words = [*SMALL, *overrides.split(), "global_batch_size=512"]
    training = in_process.prepare(tmp_path / "run", *words)
    exact: dict[int, Tensor] = {}

    def add(parameter: Tensor, gradient: Tensor) -> None:
        wide = gradient.detach().double().flatten()
        exact[id(parameter)] = exact.get(id(parameter), torch.zeros_like(wide)) + wide

    model = list(training.engine.module.parameters())
    for parameter in model:
        parameter.register_hook(lambda g, parameter=parameter: add(parameter, g))
    found: list[Tensor] = []
    wrapper = training.engine.optimizer
    wrapper.step = lambda closure=None: found.extend(accumulated(wrapper))
    wrapper._global_grad_norm = 0.0
    batch.run_batch(training, 512)
    matrices, vectors = ([p for p in model if (p.ndim >= 2) == wide] for wide in (True, False))
    wanted = [torch.cat([exact[id(p)] for p in group]) for group in (matrices, vectors)]
    # Behind the last parameter of a group there may be padding.
    ours = torch.cat([g[: len(w)] for g, w in zip(found, wanted, strict=True)])
    error = float((ours - torch.cat(wanted)).norm() / torch.cat(wanted).norm())
    least, most = BOUNDS[overrides]
    assert least <= error < most


def test_a_checkpoint_decides_in_what_its_gradients_add_up(
    in_process: InProcess, tmp_path: Path
) -> None:
    """Those of earlier versions say nothing: theirs added up in bf16, and have other files."""
    run, words = tmp_path / "run", ["dtype=bf16", "zero_stage=1", "train_iters=2"]
    in_process.train(run, *words, "grad_accum_dtype=bf16")
    for change in (lambda state: None, lambda state: delattr(state["args"], "grad_accum_dtype")):
        edit(run / "global_step2/mp_rank_00_model_states.pt", change)
        resumed = in_process.prepare(run, *words)
        assert type(resumed.engine.optimizer).__name__ == "DeepSpeedZeroOptimizer"
        assert resumed.config.grad_accum_dtype == "bf16"
    with pytest.raises(TrainError, match="grad_accum_dtype is bf16, the config says fp32"):
        in_process.prepare(run, *words, "grad_accum_dtype=fp32")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.long
def test_a_run_with_gradients_in_fp32_resumes_as_if_it_had_not_stopped(
    in_process: InProcess, tmp_path: Path, stage: int
) -> None:
    run, words = tmp_path / "run", ["dtype=bf16", f"zero_stage={stage}", "micro_batch_size=2"]
    whole = in_process.train(run, *words)
    step_back(run, 4)
    assert in_process.train(run, *words) == {i: whole[i] for i in (5, 6)}


@pytest.mark.parametrize(
    ("words", "says"),
    [(["dtype=fp16", "grad_accum_dtype=fp32"], "with dtype fp16"),
     (["dtype=bf16", "grad_accum_dtype=fp32", "zero_stage=0"], "with zero_stage 0"),
     (["dtype=bf16", "grad_accum_dtype=fp64"], "fp64")],
)  # fmt: skip
def test_what_deepspeed_cannot_do_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=f"grad_accum_dtype is .*{says}"):
        load_config(Path("train/configs/tiny.yaml"), ["save=x", "data=y", *words])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "recipe",
    [
        {"set": {"lr": 5e-4, "beta2": 0.99, "eps": 1e-6, "clip_grad": 0.5}},
        {"reset": ["moments"]},
    ],
    ids=["set", "reset"],
)
@pytest.mark.long
def test_a_surgery_holds_with_either_wrapper(
    in_process: InProcess, tmp_path: Path, dtype: str, recipe: dict[str, Any]
) -> None:
    run, words = tmp_path / "run", ["dtype=bf16", "train_iters=2", f"grad_accum_dtype={dtype}"]
    in_process.train(run, *words)
    wanted = plan(Run.open(run), from_data(recipe))
    assert wanted.promise is not None
    surgery.apply(Run.open(run), wanted)
    assert compare(wanted.promise, in_process.resumed_line(run, *words)) == []
