"""What is the same bit for bit (docs/trainer.md, "The same bits"), and on which device."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.in_process import InProcess
from tests.support.launch import REPO, launch
from tests.support.trained_run import step_back

DROPPED = ["hidden_dropout=0.1", "attention_dropout=0.1"]
WORDS = ["train_iters=4", "save_interval=2", "micro_batch_size=4", *DROPPED]


def digest(value: Any) -> Any:
    """The bits of every tensor in a checkpoint file, and where it lies there."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1).clone()
        return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {str(key): digest(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [digest(inner) for inner in value]
    return None


def bits(checkpoint: Path) -> dict[str, Any]:
    files = sorted(checkpoint.glob("*.pt"))
    return {file.name: digest(torch.load(file, weights_only=False)) for file in files}


@pytest.mark.parametrize(
    "words",
    [["zero_stage=1"], ["zero_stage=0"], ["zero_stage=1", "dtype=bf16"], ["zero_stage=3"]],
    ids=" ".join,
)
@pytest.mark.long
def test_on_a_cpu_a_second_run_and_a_replay_are_the_same_bits(
    in_process: InProcess, tmp_path: Path, words: list[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for run in (first, second):
        in_process.train(run, *WORDS, *words)
    whole = bits(first / "global_step4")
    assert len(str(whole)) > 1000
    assert bits(second / "global_step4") == whole
    step_back(second, 2)
    in_process.train(second, *WORDS, *words)
    assert bits(second / "global_step4") == whole


def test_on_a_cpu_recomputed_activations_give_the_same_bits(
    in_process: InProcess, tmp_path: Path
) -> None:
    kept, again = tmp_path / "kept", tmp_path / "again"
    in_process.train(kept, *WORDS)
    in_process.train(again, *WORDS, "checkpoint_activations=true")
    assert bits(kept / "global_step4") == bits(again / "global_step4")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.long
def test_what_tensor_ranks_hold_each_stays_the_same_bits(
    corpus: Path, tmp_path: Path, dtype: str
) -> None:
    launch(
        "--config=train/configs/tiny.yaml", "--from-scratch", f"save={tmp_path}", f"data={corpus}",
        "tensor_model_parallel_size=2", "train_iters=4", "save_interval=4", f"dtype={dtype}",
        ranks=2,
    )  # fmt: skip
    modules = [
        torch.load(tmp_path / f"global_step4/mp_rank_0{rank}_model_states.pt", weights_only=False)[
            "module"
        ]
        for rank in (0, 1)
    ]
    whole = [
        name
        for name in modules[0]
        if "layernorm" in name or name.endswith(("dense.bias", "4h_to_h.bias"))
        or "position" in name
    ]  # fmt: skip
    assert len(whole) >= 8
    for name in whole:
        assert torch.equal(modules[0][name], modules[1][name]), name
        assert modules[0][name].numel()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernels", ["always", "never"])
def test_on_a_gpu_two_runs_with_plain_attention_are_the_same_bits(
    corpus: Path, tmp_path: Path, kernels: str
) -> None:
    for run in ("first", "second"):
        words = [f"save={tmp_path / run}", f"data={corpus}", f"kernels={kernels}", *WORDS]
        subprocess.run(
            [sys.executable, "-m", "train", "--config=train/configs/tiny.yaml", "--from-scratch",
             "attention=plain", "dtype=bf16", *words],
            cwd=REPO,
            env={**os.environ, "DS_ACCELERATOR": "cuda"},
            check=True,
        )  # fmt: skip
    assert bits(tmp_path / "first/global_step4") == bits(tmp_path / "second/global_step4")
