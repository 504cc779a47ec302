"""The fused kernels change no digit of the loss that is printed for users to compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.in_process import InProcess
from tests.support.launch import run_module
from train.kernels import load

CASES = {
    "sdpa": [],
    "stable-untied": ["attention=stable", "untie_embeddings=true"],
    "relu-embed-layernorm": ["activation_fn=relu", "embed_layernorm=true"],
    "recomputed": ["checkpoint_activations=true"],
}


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, dict[str, str]]:
    """Case -> the losses of a process that computes everything in plain torch."""
    words = (tmp_path_factory.mktemp("eager"), corpus, json.dumps(CASES))
    off = {"CKPTSURGEON_KERNELS": "off"}
    done = run_module("tests.train.two_ranks", *words, environment=off)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: losses["whole"] for name, losses in found.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_eager_torch_and_the_kernels_give_one_loss(
    eager: dict[str, dict[str, str]], in_process: InProcess, tmp_path: Path, name: str
) -> None:
    if (reason := load()) is not None:
        pytest.skip(f"no native kernels: {reason}")
    fused = in_process.train(tmp_path / "run", *CASES[name])
    assert len(fused) == 6
    assert {i: float(loss) for i, loss in fused.items()} == {
        int(i): pytest.approx(float(loss), rel=5e-6) for i, loss in eager[name].items()
    }


@pytest.mark.slow  # inductor compiles for minutes
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own imports
def test_a_compiled_model_gives_the_same_loss(in_process: InProcess, tmp_path: Path) -> None:
    plain = in_process.train(tmp_path / "plain", "train_iters=3")
    compiled = in_process.train(tmp_path / "compiled", "train_iters=3", "compile=true")
    assert {i: float(loss) for i, loss in compiled.items()} == {
        i: pytest.approx(float(loss), rel=5e-6) for i, loss in plain.items()
    }


def test_ranks_of_which_some_lack_the_kernels_are_refused(tmp_path: Path, corpus: Path) -> None:
    """A node without a compiler: one kind of step would wait for the other for ever."""
    if load() is not None:
        pytest.skip(f"no native kernels: {load()}")
    words = ["--config=train/configs/tiny.yaml", "--from-scratch", f"data={corpus}"]
    done = run_module("tests.train.lacking", *words, f"save={tmp_path / 'run'}", ranks=2, status=1)
    said = "error: rank 1 has no native kernels and others have: CKPTSURGEON_KERNELS=off"
    assert done.stderr.count(said) == 1
