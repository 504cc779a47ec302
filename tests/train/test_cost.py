"""What a step costs beside its arithmetic: calls of kernels, and waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.in_process import TINY, InProcess
from train import batch, optimizer
from train.config import Config, load_config
from train.optimizer import live_optimizer, make_optimizer, overlaps

FUSED = ["fused_optimizer=always", "lr_warmup_samples=0"]
EACH_WRAPPER = [
    ["zero_stage=0"], ["zero_stage=1"], ["zero_stage=2"], ["zero_stage=0", "dtype=bf16"],
    ["zero_stage=1", "dtype=bf16"], ["zero_stage=2", "dtype=bf16"], ["zero_stage=1", "dtype=fp16"],
]  # fmt: skip
LIMIT = "skip_grad_norm=1000.0"
WAITS = ("item", "tolist", "__float__", "__int__", "__bool__")
"""Methods of a tensor that wait until the device has computed it."""


def config(*overrides: str) -> Config:
    return load_config(TINY, ["save=x", "data=y", *overrides])


class Calls(TorchDispatchMode):
    """Counts the ops of this project's kernels that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ckptsurgeon":
            self.counted[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("overrides", EACH_WRAPPER, ids=" ".join)
def test_the_optimizer_is_launched_once_a_param_group_and_the_norm_is_taken_once(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    """Not once a parameter, of which a model has hundreds."""
    training = in_process.prepare(tmp_path / "run", *overrides, *FUSED)
    batch.run_batch(training, 8)  # the first step makes the moments
    with Calls() as calls:
        batch.run_batch(training, 8)
    groups = len(live_optimizer(training.engine).param_groups)
    assert calls.counted["adamw_flat_"] == groups == 2
    assert calls.counted["grad_norm_check"] == 1


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Counter[str]]:
    """Counts where the host waits inside the steps of an engine from now on; Adam's step counts lie
    on the host."""

    def count(engine: Any) -> Counter[str]:
        counted: Counter[str] = Counter()
        inside = [False]
        step = engine.step

        def stepped(**keywords: Any) -> Any:
            inside[0] = True
            try:
                return step(**keywords)
            finally:
                inside[0] = False

        def watched(name: str) -> Callable[..., Any]:
            own = getattr(Tensor, name)

            def method(tensor: Tensor, *arguments: Any) -> Any:
                states = live_optimizer(engine).state.values()
                if inside[0] and not any(tensor is state.get("step") for state in states):
                    counted[name] += 1
                return own(tensor, *arguments)

            return method

        for name in WAITS:
            monkeypatch.setattr(Tensor, name, watched(name))
        monkeypatch.setattr(engine, "step", stepped)
        return counted

    return count


@pytest.mark.parametrize("overrides", [*EACH_WRAPPER, ["zero_stage=1", LIMIT]], ids=" ".join)
def test_a_step_waits_for_its_norm_where_a_loss_scale_or_a_limit_depends_on_it(
    in_process: InProcess,
    tmp_path: Path,
    overrides: list[str],
    waits: Callable[[Any], Counter[str]],
) -> None:
    training = in_process.prepare(tmp_path / "run", *overrides, *FUSED)
    batch.run_batch(training, 8)
    counted = waits(training.engine)
    batch.run_batch(training, 8)
    needed = any(word in ("dtype=fp16", LIMIT) for word in overrides)
    assert sum(counted.values()) == int(needed), counted


def test_deepspeed_does_not_wait_for_the_device(
    in_process: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its throughput timer would, in each forward pass and each step."""
    training = in_process.prepare(tmp_path / "run", "micro_batch_size=2")
    waited = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: waited.append(1))
    batch.run_batch(training, 8)
    assert waited == []


@pytest.mark.parametrize(
    ("overrides", "ranks", "kind", "expected"),
    [
        (["zero_stage=1"], 2, "cuda", True), (["zero_stage=2"], 8, "cuda", True),
        (["zero_stage=1"], 1, "cuda", False), (["zero_stage=1"], 2, "cpu", False),
        (["zero_stage=0"], 2, "cuda", False), (["zero_stage=3"], 2, "cuda", False),
        (["zero_stage=1", "overlap_comm=false"], 2, "cuda", False),
        (["zero_stage=2", "overlap_comm=true"], 2, "cpu", True),
        (["zero_stage=1", "pipeline_model_parallel_size=2"], 2, "cuda", False),
    ],
)  # fmt: skip
def test_gradients_are_reduced_during_the_backward_pass_on_gpus(
    overrides: list[str],
    ranks: int,
    kind: str,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optimizer, "device_kind", lambda: kind)
    assert overlaps(config(*overrides), ranks) is expected


@pytest.mark.parametrize(("kind", "fused"), [("cuda", True), ("cpu", None)])
def test_without_kernels_a_gpu_gets_torchs_fused_adamw(
    kind: str, fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "device_kind", lambda: kind)
    monkeypatch.setattr(optimizer, "load", lambda: "no nvcc was found")
    made = make_optimizer(config(), nn.Linear(2, 2))
    assert type(made) is torch.optim.AdamW
    assert [group["fused"] for group in made.param_groups] == [fused, fused]
