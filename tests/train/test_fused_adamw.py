"""The fused step gives what DeepSpeed's own passes give; each resumes the other's checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.in_process import InProcess
from tests.support.launch import launch
from tests.support.trained_run import losses, step_back
from train import trainer
from train.fused_adamw import FusedAdamW, statistics
from train.fused_step import fuse
from train.grad_norm import norm_check
from train.grid import ALONE
from train.kernels import load
from train.optimizer import live_optimizer

FUSED, STOCK = "fused_optimizer=always", "fused_optimizer=never"
STAGES = [
    ["zero_stage=0"], ["zero_stage=1"], ["zero_stage=2"],
    ["zero_stage=0", "dtype=bf16"], ["zero_stage=1", "dtype=bf16"], ["zero_stage=1", "dtype=fp16"],
    ["zero_stage=2", "dtype=bf16"], ["zero_stage=1", "dtype=bf16", "grad_accum_dtype=bf16"],
]  # fmt: skip
NIGHTLY = (["zero_stage=0", "dtype=bf16"], ["zero_stage=2", "dtype=bf16"])
"""A stage and a dtype that `make test` has each with another one."""


def some(stages: Iterable[list[str]]) -> Any:
    """The mark of a test of these stages."""
    rows = [
        pytest.param(
            words, id=" ".join(words), marks=[pytest.mark.slow] if words in NIGHTLY else []
        )
        for words in stages
    ]
    return pytest.mark.parametrize("overrides", rows)


TOKENS = {"": 1, " vs tokens": 256}
SIGNALS = {
    "num-zeros": {"num-zeros": TOKENS | {" vs samples": 8}},
    "params-norm": {"params-norm": TOKENS | {" vs samples": 8}},
    "optimizer": dict.fromkeys(
        ("variance_l1", "variance_abs_max", "weight_l2", "update_l2", "update_rms"), TOKENS
    ),
}
DIGITS = 5e-6  # half a unit of the fifth digit
# One weight that is rounded the other way changes by 2^-8 of itself, or by 2^-11: that moved these
# losses by up to 7e-5 of themselves.
SIXTEEN = 2e-4


def near(ours: dict[int, str], theirs: dict[int, str], overrides: list[str]) -> bool:
    tolerance = SIXTEEN if any("dtype" in word for word in overrides) else DIGITS
    return ours.keys() == theirs.keys() and all(
        math.isclose(float(ours[i]), float(theirs[i]), rel_tol=tolerance) for i in ours
    )


def shape(value: Any) -> Any:
    """What a checkpoint file is made of, without the numbers in it."""
    if isinstance(value, torch.Tensor):
        return (type(value), value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shape(inner) for inner in value]
    return type(value)


def optimizer_file(run: Path) -> Any:
    folder = run / "global_step4"
    files = [*folder.glob("*optim_states.pt"), folder / "mp_rank_00_model_states.pt"]
    content = torch.load(files[0], weights_only=False)
    return content.get("optimizer_state_dict", content.get("optimizer"))


@some(STAGES)
@pytest.mark.long
def test_either_step_resumes_the_others_checkpoint(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    overrides = [*overrides, "lr_warmup_samples=0"]
    fused, stock = tmp_path / "fused", tmp_path / "stock"
    ours = in_process.train(fused, *overrides, FUSED)
    theirs = in_process.train(stock, *overrides, STOCK)
    assert near(ours, theirs, overrides)
    assert shape(optimizer_file(fused)) == shape(optimizer_file(stock))
    for run, other in ((fused, STOCK), (stock, FUSED)):
        step_back(run, 4)
        resumed = in_process.train(run, *overrides, other)
        assert near(resumed, {i: theirs[i] for i in (5, 6)}, overrides)


@some(STAGES)
@pytest.mark.long
def test_the_passes_of_deepspeed_are_not_run(
    in_process: InProcess, tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = in_process.prepare(tmp_path / "run", *overrides, FUSED)
    engine = training.engine
    wrapper = engine.optimizer
    called: list[str] = []
    for name in ("check_overflow", "scaled_global_norm", "unscale_and_clip_grads"):
        if hasattr(wrapper, name):
            monkeypatch.setattr(wrapper, name, lambda *_, name=name, **__: called.append(name))
    trainer.train(training, in_process.said.append)
    assert called == []
    assert isinstance(live_optimizer(engine), FusedAdamW)
    assert {int(s["step"]) for s in live_optimizer(engine).state.values()} == {6}


@pytest.mark.long
def test_two_ranks_get_the_same_losses(corpus: Path, tmp_path: Path) -> None:
    words = ["--config=train/configs/tiny.yaml", "--from-scratch", f"data={corpus}"]
    fused, stock = (
        losses(launch(*words, f"save={tmp_path / mode}", mode, "train_iters=4", ranks=2).stdout)
        for mode in (FUSED, STOCK)
    )
    assert len(fused) == 4
    assert near(fused, stock, [])


def test_another_deepspeed_keeps_its_own_step_and_the_losses(
    in_process: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = in_process.train(tmp_path / "known", FUSED)
    monkeypatch.setattr("train.fused_step.KNOWN", "0.18.")
    assert near(in_process.train(tmp_path / "unknown", FUSED), ours, [])


def test_earlier_releases_of_the_known_deepspeed_can_be_started(
    in_process: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 0.19.6 and 0.19.0 were found to lack."""
    engine = in_process.prepare(tmp_path / "run", FUSED).engine
    monkeypatch.delattr(engine.optimizer, "compute_grad_norm")
    assert fuse(engine, ALONE)
    monkeypatch.delattr(type(engine.optimizer), "_release_preflattened_grad_buffers")
    assert not fuse(engine, ALONE)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@some(STAGES)
def test_a_nonfinite_gradient_does_what_it_does_in_deepspeed(
    in_process: InProcess, tmp_path: Path, overrides: list[str], bad: float
) -> None:
    """In one parameter of one step: what the others become is up to the clipping."""
    weights = []
    for mode in (FUSED, STOCK):
        training = in_process.prepare(tmp_path / mode, *overrides, mode, "train_iters=1")
        model = training.engine.module
        next(model.parameters()).register_hook(lambda g: g * bad)
        trainer.train(training, in_process.said.append)
        weights.append([p.detach().float().clone() for p in model.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("limit", [[], ["skip_grad_norm=1000.0"]], ids=["", "limit"])
@some(words for words in STAGES if words != ["zero_stage=0"])
@pytest.mark.long
def test_a_later_step_that_is_not_finite_is_left_out_as_by_deepspeed(
    in_process: InProcess, tmp_path: Path, overrides: list[str], limit: list[str]
) -> None:
    """Without a loss scale the host learns of it when the step is over, and takes back what it has
    counted."""
    words = [*overrides, *limit, "train_iters=5", "save_interval=1", "lr_warmup_samples=16"]
    told, states = [], []
    for mode in (FUSED, STOCK):
        run = tmp_path / mode
        training = in_process.prepare(run, *words, mode)
        progress = training.progress
        next(training.engine.module.parameters()).register_hook(
            lambda g, progress=progress: g * (math.nan if progress.iteration in (2, 3) else 1)
        )
        in_process.said = []
        trainer.train(training, in_process.said.append)
        said = "\n".join(in_process.said)
        fields = ("learning rate", "grad norm", "number of skipped iterations", "clipped steps")
        told.append([re.findall(rf"\| ?{field}: +(\S+) \|", said) for field in fields])
        assert len(re.findall("the gradients overflowed.*: its update is left out", said)) == 2
        saved = torch.load(run / "global_step4/mp_rank_00_model_states.pt", weights_only=False)
        counts = {key: saved[key] for key in ("lr_scheduler", "global_steps", "skipped_steps")}
        optimizer = live_optimizer(training.engine)
        steps = [int(state["step"]) for state in optimizer.state.values()]
        states.append((counts, steps, shape(optimizer_file(run))))
        kept = [
            torch.load(next((run / f"global_step{step}").glob("mp_*")), weights_only=False)[
                "module"
            ]
            for step in (2, 4)
        ]
        assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    assert states[0] == states[1]
    assert states[0][0]["skipped_steps"] == 2 and set(states[0][1]) == {3}
    assert told[0][0] == told[1][0] and told[0][2:] == told[1][2:]
    finite = [[norm for norm in norms if norm != "inf"] for _, norms, _, _ in told]
    assert [len(norms) for norms in finite] == [3, 3]
    for ours, theirs in zip(*finite, strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=5e-3)


def test_auto_is_fused_where_the_kernels_are_native(in_process: InProcess, tmp_path: Path) -> None:
    engine = in_process.prepare(tmp_path / "run").engine
    assert isinstance(live_optimizer(engine), FusedAdamW) == (load() is None)


def test_the_statistics_are_those_of_weights_and_moments() -> None:
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    before = [p.detach().clone() for p in parameters]
    optimizer = FusedAdamW(parameters, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    v = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in parameters])
    p = torch.cat([p.detach().flatten() for p in parameters])
    change = p - torch.cat([p.flatten() for p in before])
    told = statistics(optimizer.take_sums(), p.numel())
    assert told.variance_l1 == pytest.approx(float(v.sum()), rel=1e-5)
    assert told.variance_max == pytest.approx(float(v.max()), rel=1e-6)
    assert told.weight_l2 == pytest.approx(float(p.norm()), rel=1e-5)
    assert told.update_l2 == pytest.approx(float(change.norm()), rel=1e-5)
    assert told.update_rms == pytest.approx(1.0, rel=1e-5)  # each first step goes by 1
    assert told.zeros == 0


@some([*STAGES, ["zero_stage=3"]])
@pytest.mark.long
def test_the_statistics_of_a_step_are_logged(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    """Those of the whole model, as a step of torch's AdamW leaves it."""
    training = in_process.prepare(
        tmp_path / "stock", "zero_stage=0", STOCK, "train_iters=1", "lr_warmup_samples=0"
    )
    before = torch.cat([p.detach().clone().flatten() for p in training.engine.module.parameters()])
    trainer.train(training, in_process.said.append)
    p = torch.cat([p.detach().flatten() for p in training.engine.module.parameters()])
    states = training.engine.optimizer.state.values()
    v = torch.cat([state["exp_avg_sq"].flatten() for state in states])
    words = [*overrides, FUSED, "lr_warmup_samples=0"]
    training = in_process.prepare(tmp_path / "run", *words, "train_iters=1")
    trainer.train(training, in_process.said.append)
    own = [state["exp_avg"] for state in live_optimizer(training.engine).state.values()]
    padding = sum(moment.numel() for moment in own) - training.parameters
    in_process.train(tmp_path / "run", *words, "train_iters=2")
    values = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"tensors": 0})
    values.Reload()
    found, last = {}, {}
    for group, tags in SIGNALS.items():
        for tag, axes in tags.items():
            for axis, unit in axes.items():
                # Two files of one second are read in the order of their numbers, 10 before 9.
                events = values.Tensors(f"{group}/{tag}{axis}")
                events.sort(key=lambda event: event.step)
                assert [event.step for event in events] == [unit, 2 * unit]
                found[tag], last[tag] = (event.tensor_proto.float_val[0] for event in events)
    m = torch.cat([state["exp_avg"].flatten() for state in states])
    update = (m / (1 - 0.9)) / ((v / (1 - 0.95)).sqrt() + 1e-8)
    expected = {
        "num-zeros": sum(int((moment == 0).sum()) for moment in own) - padding,
        "params-norm": float(p.norm()),
        "update_rms": float(update.square().mean().sqrt()),
        "variance_l1": float(v.sum()),
        "variance_abs_max": float(v.max()),
        "weight_l2": float(p.norm()),
        "update_l2": float((p - before).norm()),
    }
    assert expected["variance_l1"] == pytest.approx(1 - 0.95, rel=1e-4)  # of a clipped gradient
    assert found == pytest.approx(expected, rel=3e-2 if len(overrides) > 1 else 1e-4)
    for name, tag in (
        ("num zeros", "num-zeros"), ("params norm", "params-norm"), ("update rms", "update_rms"),
        ("adam variance l1 norm", "variance_l1"), ("adam variance max", "variance_abs_max"),
    ):  # fmt: skip
        line = re.search(rf"\| {name}: (\S+) \|", in_process.said[-1])
        assert line is not None
        assert float(line[1]) == pytest.approx(last[tag], rel=1e-3)


def test_a_norm_over_no_gradients_is_zero_on_the_device_of_the_others() -> None:
    """NCCL sums what lies on a GPU only. `meta` is a device that is not the CPU, everywhere."""
    assert norm_check([], torch.device("cpu")).tolist() == [0, 0]
    assert norm_check([], torch.device("meta")).device.type == "meta"
