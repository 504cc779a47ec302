"""What could depend on the number of ranks does not: the losses of one rank are those of two."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import InProcess
from tests.support.launch import run_module
from tests.support.trained_run import step_back

DROPOUT = ["hidden_dropout=0.1", "attention_dropout=0.1"]
LLAMA = [
    "position_embedding_type=rope", "normalization=RMSNorm", "swiglu=true", "num_query_groups=2",
    "add_bias_linear=false", "num_attention_heads=4", "ffn_hidden_size=48",
]  # fmt: skip
ALIBI = ["position_embedding_type=alibi", "embed_layernorm=true", "num_attention_heads=4"]
CASES = {
    "adamw": [],
    "llama-zero3": [*LLAMA, "zero_stage=3"],
    "adamw-zero3": ["zero_stage=3"],
    "sgdw": ["optimizer=sgdw"],
    "lamb": ["optimizer=lamb"],
    "lamb-zero0": ["optimizer=lamb", "zero_stage=0"],
    "lamb-zero2": ["optimizer=lamb", "zero_stage=2"],
    "dropout": DROPOUT,
    "predivide": ["gradient_predivide_factor=32"],
    "predivide-zero0": ["gradient_predivide_factor=32", "zero_stage=0"],
    "skip": ["skip_grad_norm=2.3"],
    "skip-zero0": ["skip_grad_norm=2.3", "zero_stage=0"],
    "overlap": ["overlap_comm=true"],
    "fp16": ["dtype=fp16"],
    "bf16": ["dtype=bf16"],
    "bf16-sums": ["dtype=bf16", "grad_accum_dtype=bf16"],
    "fp16-then-fp32-zero0": ["dtype=fp16", "zero_stage=0"],
    "fp16-then-bf16-zero3": ["dtype=fp16", "zero_stage=3"],
    "bf16-then-fp32": ["dtype=bf16"],
    # Last: a process that had such groups can't make a DeepSpeed engine without them.
    "lamb-tensor": ["optimizer=lamb", "tensor_model_parallel_size=2"],
    "lamb-tensor-zero0": ["optimizer=lamb", "zero_stage=0", "tensor_model_parallel_size=2"],
    "llama-tensor": [*LLAMA, "tensor_model_parallel_size=2"],
    "alibi-tensor": [*ALIBI, "attention_dropout=0.0", "tensor_model_parallel_size=2"],
    "llama-pipeline": [*LLAMA, "pipeline_model_parallel_size=2"],
    "lamb-pipeline": ["optimizer=lamb", "pipeline_model_parallel_size=2"],
    "skip-pipeline": ["skip_grad_norm=2.3", "pipeline_model_parallel_size=2"],
    "skip-pipeline-zero0": [
        "skip_grad_norm=2.3",
        "zero_stage=0",
        "pipeline_model_parallel_size=2",
    ],
    "fp16-pipeline": ["dtype=fp16", "pipeline_model_parallel_size=2"],
    "fp16-then-bf16-pipeline": ["dtype=fp16", "pipeline_model_parallel_size=2"],
}
EVERY_DAY = {
    "adamw",
    "llama-zero3",
    "lamb",
    "skip",
    "fp16-then-fp32-zero0",
    "lamb-tensor",
    "llama-pipeline",
}
"""What `make test` tries, and trains; `make nightly` tries each."""
LATER = {name: [f"dtype={name.split('-')[2]}"] for name in CASES if "-then-" in name}
"""What is asked for at the resume in addition."""


Losses = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Losses]:
    """`on_two(case)`: the losses of a run on two ranks, and those after a resume at step 4. One
    launch has all cases of EVERY_DAY, another one the rest."""

    @cache
    def ran(every_day: bool) -> dict[str, Losses]:
        work = tmp_path_factory.mktemp("two-ranks")
        cases = {name: words for name, words in CASES.items() if (name in EVERY_DAY) == every_day}
        done = run_module(
            "tests.train.two_ranks", work, corpus, *map(json.dumps, (cases, LATER)), ranks=2
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return lambda name: ran(name in EVERY_DAY)[name]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in EVERY_DAY else [pytest.mark.slow]) for n in CASES]
)
@pytest.mark.long
def test_two_ranks_train_as_one(
    on_two: Callable[[str], Losses], in_process: InProcess, tmp_path: Path, name: str
) -> None:
    alone = ["tensor_model_parallel_size=1", "pipeline_model_parallel_size=1"]
    one = in_process.train(tmp_path / "run", *CASES[name], *alone)
    left_out = "\n".join(in_process.said).count("left out")
    assert 0 < left_out < 6 if "skip" in name else left_out == 0
    two = {int(i): loss for i, loss in on_two(name)["whole"].items()}
    assert {i: float(loss) for i, loss in two.items()} == near(one, name)
    resumed = {int(i): loss for i, loss in on_two(name)["resumed"].items()}
    if name not in LATER:
        assert resumed == {i: two[i] for i in (5, 6)}
        return
    step_back(tmp_path / "run", 4)
    later = in_process.train(tmp_path / "run", *CASES[name], *alone, *LATER[name])
    assert {i: float(loss) for i, loss in resumed.items()} == near(later, name)


def near(losses: dict[int, str], name: str) -> dict[int, Any]:
    tolerance = 2e-4 if "16" in name else 5e-6  # five digits; a 16-bit sum has another order
    return {i: pytest.approx(float(loss), rel=tolerance) for i, loss in losses.items()}
