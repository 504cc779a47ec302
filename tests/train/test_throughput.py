"""The line with tokens/s and MFU is its formula; a trace holds the iterations it was asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.in_process import InProcess
from train.log import Report
from train.throughput import flops_per_token, throughput_line

FIGURES = re.compile(
    r"tokens per second: (\S+) \| TFLOP/s per rank: (\S+) \| MFU: (\S+) % \| "
    r"peak memory \(GiB\): (\S+)"
)


def test_the_figures_are_those_of_the_formula(in_process: InProcess, tmp_path: Path) -> None:
    training = in_process.prepare(tmp_path / "run", "peak_tflops=0.5")
    h, layers, length, vocabulary = 32, 2, 32, 256
    weights = layers * (12 * h * h + 13 * h) + 2 * h
    flops = 6 * (weights + vocabulary * h) + 12 * layers * h * length
    assert flops_per_token(training) == flops
    report = Report(
        loss=1, lr=1, batch_size=4000, grad_norm=1, loss_scale=1, skipped=0, seconds=0.5
    )
    told = FIGURES.search(throughput_line(report, training, ranks=4))
    assert told is not None
    tokens, tflops, mfu, memory = map(float, told.groups())
    assert tokens == 4000 * 32 / 0.5
    assert tflops == pytest.approx(tokens * flops / 4e12, abs=1e-3)
    assert mfu == pytest.approx(100 * tokens * flops / 4e12 / 0.5, abs=0.06)
    assert 0.05 < memory < 64


def test_the_line_comes_with_each_loss_where_it_is_asked_for(
    in_process: InProcess, tmp_path: Path
) -> None:
    words = ["train_iters=4", "log_interval=2", "save_interval=9"]
    in_process.train(tmp_path / "without", *words)
    assert "tokens per second" not in "\n".join(in_process.said)
    in_process.train(tmp_path / "with", *words, "log_throughput=true")
    lines = [line for line in in_process.said if "tokens per second" in line]
    assert len(lines) == 2 and "MFU" not in lines[0]  # of a CPU no peak is known


@pytest.mark.parametrize("span", [[2, 3], [3, 9]])
@pytest.mark.long
def test_a_trace_holds_its_iterations(
    in_process: InProcess, tmp_path: Path, span: list[int]
) -> None:
    run = tmp_path / "run"
    plain = in_process.train(tmp_path / "plain", "train_iters=4")
    assert in_process.train(run, f"profile={span}".replace(" ", ""), "train_iters=4") == plain
    trace = json.loads((run / f"profile-{span[0]}-{span[1]}.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    forward = names.count("aten::scaled_dot_product_attention")
    assert forward == 2 * 2 * 2  # iterations, micro-batches, layers
