"""No alarm on what the optimizers of three libraries save, at any step; 8-bit moments are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look
from ckptsurgeon.look.vitals.vitals import examine
from tests.support.optimizer_classes import CASES, process_group
from tests.support.optimizer_law import save, update

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
FREE = "the optimizer is not known to be Adam"


SLOW = ("torchao.Adam4bit", "torchao.AdamW4bit", "torchao.Adam8bit")
"""Each takes a minute; AdamW's eight bits are tried."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
)
def test_no_step_of_an_optimizer_raises_an_alarm(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    with process_group(tmp_path):
        model = case.kind()
        optimizer = case.make(model)
        for step in range(1, 9):
            update(model, optimizer, step)
            save(tmp_path / "run", model, optimizer, step)
            told = look.verify(Run.open(tmp_path / "run"), step, level=4)
            vitals = [text for text in told.findings if "beyond" in text or "counter" in text]
            assert vitals == []


def eight_bit(root: Path, betas: tuple[float, float], steps: int) -> torch.optim.Optimizer:
    """AdamW8bit on gradients of five kinds, saved at every tenth step."""
    from bitsandbytes.optim import AdamW8bit

    g = torch.Generator().manual_seed(0)
    shape = (128, 64)

    def gradients(step: int) -> list[torch.Tensor]:
        return [
            torch.randn(shape, generator=g),
            torch.randn(shape, generator=g) / torch.randn(shape, generator=g),
            torch.full(shape, 1.05**step),
            torch.rand(shape, generator=g) * (torch.rand(shape, generator=g) > 0.9),
            torch.randn(shape, generator=g) * torch.logspace(-8, 0, 64),
        ]

    weights = [torch.nn.Parameter(torch.randn(shape, generator=g)) for _ in range(5)]
    optimizer: torch.optim.Optimizer = AdamW8bit(weights, lr=1e-3, betas=betas)
    for step in range(1, steps + 1):
        for weight, gradient in zip(weights, gradients(step), strict=True):
            weight.grad = gradient
        optimizer.step()
        if step % 10 == 0 or step < 5:
            write(root, optimizer.state_dict(), step)
    return optimizer


def write(root: Path, state: dict[str, Any], step: int) -> None:
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "optimizer.pt")
    schedule = {"last_epoch": step, "_step_count": step + 1, "base_lrs": [1e-3], "_last_lr": [1e-3]}
    torch.save(schedule, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_eight_bit_moments_keep_the_bound_and_a_lost_second_one_does_not(
    tmp_path: Path, betas: tuple[float, float]
) -> None:
    root = tmp_path / "run"
    optimizer = eight_bit(root, betas, 60)
    run = Run.open(root)
    for step in run.steps():
        told = look.verify(run, step, level=4)
        assert told.findings == () and not any("bound" in text for text in told.not_compared)
    seen = examine(run)
    assert len([sign for sign in seen.signs if sign.update_rms is not None]) == 5
    state = optimizer.state_dict()
    for each in state["state"].values():
        inner = each.get("__bnb_optimizer_quant_state__", each)
        inner["absmax2"].zero_()
    write(root, state, 60)
    (finding,) = look.verify(run, 60, level=4).findings
    assert "no gradients lead beyond" in finding
