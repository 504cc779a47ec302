"""Loss scale, overflow, pre-division and the skip on a large gradient norm, on real engines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Recipe, Reset, Run, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from tests.support.in_process import InProcess
from tests.support.trained_run import step_back
from train.errors import TrainError

OVERFLOWS = ["dtype=fp16", f"initial_loss_scale={2.0**21}", "hysteresis=1", "lr_warmup_samples=0"]
"""A scale at which the first gradients overflow, and which falls at once."""


def reported(said: list[str], field: str) -> list[str]:
    return re.findall(rf"\| {field}: +(\S+) \|", "\n".join(said))


def model_states(run: Path, step: int) -> dict[str, Any]:
    """Of a ZeRO stage up to 2, or rank 0's of stage 3."""
    file = next((run / f"global_step{step}").glob("*mp_rank_00_model_states.pt"))
    return dict(torch.load(file, weights_only=False))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "overrides",
    [
        ["zero_stage=0"], ["zero_stage=1"], ["zero_stage=2"], ["zero_stage=3"],
        ["zero_stage=0", "dtype=bf16"], ["zero_stage=0", "dtype=fp16"],
        ["zero_stage=1", "dtype=fp16"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.long
def test_a_step_above_the_limit_changes_nothing_and_is_counted(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    """At a rate that moves nothing the norms are known before: the limit lies between them."""
    overrides = [*overrides, "train_iters=4", "save_interval=1", "lr=1e-12", "min_lr=0"]
    in_process.train(tmp_path / "free", *overrides)
    norms = reported(in_process.said, "grad norm")
    low, high = sorted(map(float, norms))[:2]
    run, limit = tmp_path / "run", (low + high) / 2
    in_process.train(run, *overrides, f"skip_grad_norm={limit}")
    assert reported(in_process.said, "grad norm") == norms
    skipped = ["1" if float(norm) > limit else "0" for norm in norms]
    assert reported(in_process.said, "number of skipped iterations") == skipped
    told = re.findall(r"grad norm (\S+) is above skip_grad_norm", "\n".join(in_process.said))
    assert told == [norm for norm in norms if float(norm) > limit]
    last = model_states(run, 4)
    assert (last["global_steps"], last["skipped_steps"]) == (4, 3)
    assert last["lr_scheduler"]["num_steps"] == 8
    line = json.loads(in_process.resumed_line(run, *overrides))
    assert (line["step"], line["adam_step"], line["consumed_samples"]) == (5, 1, 32)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.long
def test_a_run_whose_steps_are_all_left_out_keeps_its_weights(
    in_process: InProcess, tmp_path: Path, stage: int
) -> None:
    overrides = [f"zero_stage={stage}", "train_iters=3", "lr_warmup_samples=0"]
    kept = in_process.train(tmp_path / "run", *overrides, "skip_grad_norm=1e-6")
    assert kept == in_process.train(tmp_path / "still", *overrides, "lr=0", "min_lr=0")
    assert kept != in_process.train(tmp_path / "moving", *overrides)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.long
def test_an_overflow_is_a_skipped_step_and_the_scale_falls(
    in_process: InProcess, tmp_path: Path, stage: int
) -> None:
    run, overrides = tmp_path / "run", [*OVERFLOWS, f"zero_stage={stage}"]
    whole = in_process.train(run, *overrides)
    norms = reported(in_process.said, "grad norm")
    skipped = norms.count("inf")
    assert 1 <= skipped <= 4 and norms[:skipped] == ["inf"] * skipped
    assert "overflowed, loss scale now 1.04858e+06: its update is left out" in in_process.said[2]
    last = model_states(run, 6)
    assert (last["global_steps"], last["skipped_steps"]) == (6, skipped)
    assert last["lr_scheduler"]["num_steps"] == 8 * (6 - skipped)
    line = json.loads(in_process.resumed_line(run, *overrides))
    assert line["loss_scale"] == 2.0 ** (21 - skipped)
    assert line["adam_step"] == 6 - skipped
    step_back(run, 4)
    assert in_process.train(run, *overrides) == {i: whole[i] for i in (5, 6)}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.long
def test_a_reset_of_the_loss_scale_is_what_the_next_step_uses(
    in_process: InProcess, tmp_path: Path, stage: int
) -> None:
    run, overrides = tmp_path / "run", [*OVERFLOWS, f"zero_stage={stage}"]
    in_process.train(run, *overrides)
    fallen = json.loads(in_process.resumed_line(run, *overrides))["loss_scale"]
    wanted = plan(Run.open(run), Recipe(Reset(reset=["loss_scale"])))
    assert wanted.promise is not None and fallen < wanted.promise.loss_scale == 2.0**21
    surgery.apply(Run.open(run), wanted)
    assert compare(wanted.promise, in_process.resumed_line(run, *overrides)) == []


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.long
def test_the_scaler_of_the_checkpoint_wins_over_the_config(
    in_process: InProcess, tmp_path: Path, kind: str, stage: int
) -> None:
    from train.optimizer import live_scaler
    from train.trainer import differences

    run, common = tmp_path / "run", ["dtype=fp16", f"zero_stage={stage}", "train_iters=2"]
    options = {
        "dynamic": ["loss_scale_window=7"] + ["min_loss_scale=4"] * stage,  # kept by ZeRO only
        "static": ["loss_scale=256.0"],
    }[kind]
    in_process.train(run, *common, *options)
    resumed = in_process.prepare(run, *common)
    scaler = live_scaler(resumed.engine)
    for option in options:
        name, _, value = option.partition("=")
        assert str(scaler[name]) == value == str(getattr(model_states(run, 2)["args"], name))
        default = getattr(resumed.config, name)
        assert f"{name}: config {default}, checkpoint {value}: the checkpoint wins" in differences(
            resumed
        )
    line = json.loads(in_process.resumed_line(run, *common))
    assert line["loss_scale"] == {"dynamic": 65536.0, "static": 256.0}[kind]


def test_an_overflow_at_the_smallest_scale_ends_the_run(
    in_process: InProcess, tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match=r"smallest loss scale, 2.09715e\+06: the run has div"):
        in_process.train(tmp_path / "run", *OVERFLOWS, f"min_loss_scale={2**21}")


@pytest.mark.parametrize("optimizer", ["adamw", "sgdw"])
@pytest.mark.long
def test_fp16_without_zero_trains_as_with_it(
    in_process: InProcess, tmp_path: Path, optimizer: str
) -> None:
    """DeepSpeed scales the loss under ZeRO only; SGDW would show any factor that is left."""
    overrides = ["dtype=fp16", f"optimizer={optimizer}", "clip_grad=0"]
    zero, one = (
        in_process.train(tmp_path / str(stage), *overrides, f"zero_stage={stage}")
        for stage in (0, 1)
    )
    assert zero == one
    fp32 = in_process.train(tmp_path / "fp32", *overrides, "dtype=fp32")
    assert float(one[6]) == pytest.approx(float(fp32[6]), rel=2e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.long
def test_gradients_are_divided_before_they_are_summed(
    in_process: InProcess, tmp_path: Path, stage: int
) -> None:
    """OPT 11.0 divided by 32. With 2^30 every fp16 gradient at scale 1 is rounded to 0 by the
    division, and the multiplication after the sum can't bring it back; in fp32 nothing is lost."""
    overrides = ["train_iters=1", f"zero_stage={stage}", f"gradient_predivide_factor={2.0**30}"]
    in_process.train(tmp_path / "fp16", *overrides, "dtype=fp16", "loss_scale=1")
    assert reported(in_process.said, "grad norm") == ["0.000"]
    in_process.train(tmp_path / "fp32", *overrides)
    norm = reported(in_process.said, "grad norm")
    in_process.train(tmp_path / "without", *overrides, "gradient_predivide_factor=1")
    assert norm == reported(in_process.said, "grad norm") != ["0.000"]
