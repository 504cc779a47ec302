"""TensorBoard's own reader finds Megatron-DeepSpeed's tags on their axes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import Trained
from train.fused_adamw import Statistics
from train.log import Report, loss_line, mean
from train.progress import Progress

LOSS = "lm-loss-training/lm loss"
FOUR_AXES = {"": 1, " vs samples": 8, " vs tokens": 256}


@pytest.fixture
def events(trained: Trained) -> EventAccumulator:
    accumulator = EventAccumulator(
        str(trained() / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}
    )
    accumulator.Reload()
    return accumulator


def steps(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Tensors(tag)]


def test_every_series_has_its_axes(events: EventAccumulator) -> None:
    for tag in ("learning-rate/learning-rate", "loss-scale/loss-scale", "grad-norm/grad-norm",
                "iteration-time/iteration-time", LOSS):  # fmt: skip
        for axis, unit in FOUR_AXES.items():
            assert steps(events, tag + axis) == [unit * i for i in range(1, 9)]
    assert steps(events, "batch-size/batch-size vs samples") == [8 * i for i in range(1, 9)]
    assert "batch-size/batch-size vs tokens" not in events.Tags()["tensors"]
    assert steps(events, "iteration-time/samples per second") == list(range(1, 9))
    assert len(steps(events, f"{LOSS} vs gigaflos (without embeddings)")) == 8
    assert events.Tags()["scalars"] == []  # new-style: every value is a tensor


def test_steps_samples_and_tokens_point_at_each_other(events: EventAccumulator) -> None:
    for name, unit in (("samples", 8), ("tokens", 256)):
        series = events.Tensors(f"steps-vs-{name}/y=steps,x={name}")
        assert [(e.step, e.tensor_proto.float_val[0]) for e in series] == [
            (unit * i, i) for i in range(1, 9)
        ]
        assert steps(events, f"steps-vs-{name}/y={name},x=steps") == list(range(1, 9))


def test_a_restart_is_marked_by_the_world_size(events: EventAccumulator) -> None:
    series = events.Tensors("iteration-time/world_size")
    assert [(e.step, e.tensor_proto.float_val[0]) for e in series] == [(0, 1.0), (1, 0.0)]


def test_the_loss_line_is_megatrons() -> None:
    progress = Progress(iteration=50, samples=400)
    report = Report(
        loss=3.123456, lr=0.05, batch_size=8, grad_norm=1.2341, loss_scale=1.0, skipped=0,
        seconds=0.0125,
    )  # fmt: skip
    assert loss_line(report, progress, 400) == (
        " iteration       50/     400 | consumed samples:          400 |"
        " elapsed time per iteration (ms): 12.5 | learning rate: 5.000E-02 |"
        " global batch size:     8 | lm loss: 3.123456E+00 | loss scale: 1.0 | grad norm: 1.234 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    grown = loss_line(replace(report, curriculum_seqlen=24), progress, 400)
    assert "| grad norm: 1.234 | curriculum seqlen:    24 | number of skipped" in grown


def test_the_signals_have_their_place_in_the_line() -> None:
    report = Report(
        loss=3.0, lr=0.05, batch_size=8, grad_norm=1.25, loss_scale=1.0, skipped=0, seconds=1.0,
        statistics=Statistics(1.5, 0.25, 40.0, 0.5, 0.21, 7), activation_norm=5.5, clipped=0.125,
    )  # fmt: skip
    line = loss_line(report, Progress(), 400)
    assert "| grad norm: 1.250 | num zeros: 7.0 | params norm: 40.000 | number of skipped" in line
    assert line.endswith(
        "| number of nan iterations:   0 | activation norm: 5.500 | clipped steps: 0.1250 |"
        " adam variance l1 norm: 1.5000E+00 | adam variance max: 2.5000E-01 | update rms: 0.2100 |"
    )


def test_one_line_tells_of_all_iterations_since_the_last_one() -> None:
    one = Report(2.0, 0.1, 8, 1.0, 4.0, skipped=1, seconds=1.0)
    two = Report(math.inf, 0.2, 8, 2.0, 2.0, skipped=0, seconds=3.0)
    three = Report(4.0, 0.3, 8, 3.0, 1.0, skipped=1, seconds=2.0)
    assert mean([one, two, three]) == replace(three, loss=3.0, seconds=2.0, skipped=2, nan=1)
    assert math.isinf(mean([two]).loss) and mean([two]).nan == 1
