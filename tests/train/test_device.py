"""One function decides where everything computes, and what can't be used is said in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.in_process import InProcess
from tests.support.launch import REPO
from train import device
from train.device import device_kind, full_memory_told, unused_gpu
from train.errors import RankError, TrainError, UsageError

# A machine with a GPU, as far as torch can tell; whatever touches it fails.
FAKED = """
import os, sys
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
from train.__main__ import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("asked", "available", "kind"),
    [("cpu", True, "cpu"), ("cpu", False, "cpu"), ("", True, "cuda"), ("", False, "cpu"),
     ("cuda", True, "cuda")],
)  # fmt: skip
def test_the_accelerator_that_is_asked_for_is_the_device(
    asked: str, available: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setenv("DS_ACCELERATOR", asked)
    assert device_kind() == kind


@pytest.mark.parametrize(("asked", "says"), [("cuda", "finds no GPU"), ("tpu", "is 'tpu'")])
def test_an_accelerator_that_is_not_there_is_refused(
    asked: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "DRIVER", Path("/no/driver"))
    monkeypatch.setenv("DS_ACCELERATOR", asked)
    with pytest.raises(UsageError, match=says):
        device_kind()


def test_nobody_else_asks_torch_for_a_gpu() -> None:
    asking = [
        path.name
        for path in (REPO / "train").rglob("*.py")
        if "cuda.is_available" in path.read_text("utf-8")
    ]
    assert asking == ["device.py"]


@pytest.mark.long
def test_with_ds_accelerator_cpu_a_machine_with_a_gpu_trains_on_its_cpu(
    corpus: Path, tmp_path: Path
) -> None:
    """Process group, batches, model, kernels and random generators: one of them on the GPU that
    is not there would end the run."""
    words = ["--config=train/configs/tiny.yaml", "--from-scratch", "train_iters=2"]
    done = subprocess.run(
        [sys.executable, "-c", FAKED, *words, "save_interval=2", f"save={tmp_path}/run",
         f"data={corpus}", "hidden_dropout=0.1"],
        cwd=REPO,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "iteration        2/" in done.stdout
    state = torch.load(tmp_path / "run/global_step2/mp_rank_00_model_states.pt", weights_only=False)
    assert "cuda_rng_state" not in state


def test_a_torch_for_cpus_on_a_machine_with_a_gpu_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert (
        unused_gpu() == f"torch {torch.__version__} is a build for CPUs: install the one for "
        "your CUDA"
    )


def test_a_driver_that_is_too_old_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found 11040). Please …")

    monkeypatch.setattr(device, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    said = unused_gpu()
    assert said is not None
    assert said.endswith("says: The NVIDIA driver on your system is too old (found 11040)")


def test_a_gpu_that_is_full_says_what_to_change() -> None:
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried 2 GiB. GPU 0 has 1 GiB")
    says = "rank .: the GPU has no room: CUDA out of memory. Tried 2 GiB"
    with pytest.raises(RankError, match=says) as told, full_memory_told():
        raise full
    assert "checkpoint_activations=true" in told.value.render()


def test_ranks_with_another_torch_are_refused_before_anything_is_written(
    in_process: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the second of two machines would say is all that is made up."""
    monkeypatch.setattr("train.trainer.distributed.gather", lambda own: [own, ("2.10.0", own[1])])
    with pytest.raises(TrainError) as refused:
        in_process.prepare(tmp_path / "run")
    assert refused.value.what == f"rank 1 runs torch 2.10.0, rank 0 torch {torch.__version__}"
    assert not (tmp_path / "run").exists()
