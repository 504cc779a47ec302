"""Which kernels compute where: the rule of docs/trainer.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.in_process import InProcess
from train.config import FUSED
from train.fused_adamw import FusedAdamW
from train.kernels import CHOICES, choose
from train.kernels.library import load, runs_natively
from train.optimizer import live_optimizer


class OnGpu:
    """What `runs_natively` asks of a tensor, as one on a GPU answers."""

    device = torch.device("cuda")
    dtype = torch.bfloat16


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    choose("auto")


def test_the_choices_are_those_of_the_config() -> None:
    assert tuple(CHOICES) == FUSED


@pytest.mark.parametrize(
    ("kernels", "on_cpu", "on_gpu"),
    [("auto", True, False), ("always", True, True), ("never", False, False)],
)
@pytest.mark.parametrize(
    ("gpu", "measured"), [((8, 0), False), ((9, 0), True), ((10, 0), False), (None, False)]
)
def test_on_a_gpu_the_layers_kernels_are_off_until_they_are_measured(
    kernels: str,
    on_cpu: bool,
    on_gpu: bool,
    gpu: tuple[int, int] | None,
    measured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if load() is not None:
        pytest.skip("no native kernels")
    monkeypatch.setattr("train.kernels.library._has_native", lambda name, key: True)
    monkeypatch.setattr("train.kernels.library.device_kind", lambda: "cuda" if gpu else "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    choose(kernels)
    assert runs_natively("bias_gelu", torch.ones(3)) is on_cpu
    expected = on_gpu or (kernels == "auto" and measured)
    assert runs_natively("bias_gelu", OnGpu()) is expected  # type: ignore[arg-type]


def test_without_the_layers_kernels_the_optimizer_keeps_its_own(
    in_process: InProcess, tmp_path: Path
) -> None:
    if load() is not None:
        pytest.skip("no native kernels")
    training = in_process.prepare(tmp_path / "run", "kernels=never")
    assert not runs_natively("bias_gelu", torch.ones(3))
    assert isinstance(live_optimizer(training.engine), FusedAdamW)
