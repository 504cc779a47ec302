"""The trainer with bitsandbytes' 8-bit AdamW: trained, operated on, resumed."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data
from tests.support.in_process import InProcess
from tests.support.trained_run import step_back
from train.config import Config
from train.errors import TrainError
from train.model import GPT
from train.optimizer import live_optimizer, make_optimizer

EIGHT = "optimizer=adamw8bit"
KINDS = [
    ["zero_stage=0"], ["zero_stage=1"], ["zero_stage=2"], ["zero_stage=3"],
    ["zero_stage=0", "dtype=bf16"], ["zero_stage=1", "dtype=bf16"], ["zero_stage=1", "dtype=fp16"],
]  # fmt: skip


def test_without_bitsandbytes_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = Config(save="", data="", optimizer="adamw8bit")
    with pytest.raises(TrainError, match="optimizer=adamw8bit is bitsandbytes'"):
        make_optimizer(config, GPT(config))


@pytest.mark.formats
@pytest.mark.parametrize("overrides", KINDS, ids=" ".join)
def test_what_was_set_is_what_the_8_bit_optimizer_uses(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    words = [*overrides, "lr_warmup_samples=0"]
    wide = in_process.train(tmp_path / "wide", *words)
    root = tmp_path / "run"
    whole = in_process.train(root, *words, EIGHT)
    for iteration, loss in wide.items():  # the quantization is all that differs
        assert math.isclose(float(loss), float(whole[iteration]), rel_tol=1e-2)
    step_back(root, 4)
    again = in_process.train(root, *words, EIGHT)
    assert again == {i: whole[i] for i in (5, 6)}
    recipe: dict[str, Any] = {
        "rollback": {"to": 4},
        "set": {"lr": 5e-4, "beta2": 0.9},
        "reset": ["moments"],
    }
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    assert made.promise is not None
    assert compare(made.promise, in_process.resumed_line(root, *words, EIGHT)) == []
    training = in_process.prepare(root, *words, EIGHT)
    states = live_optimizer(training.engine).state.values()
    assert {str(state["state1"].dtype) for state in states} >= {"torch.uint8"}
    for state in states:
        scale = state["absmax1"] if "absmax1" in state else state["state1"]
        assert not scale.any()
