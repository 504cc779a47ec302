"""The closed form of a cooldown, what Accelerate saves of a scheduler of torch, and the one that a
refusal names."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

PEAK, STEP, D = 1e-3, 60, 10
CLASSES: dict[str, Callable[[Any], Any]] = {
    "LinearLR": lambda o: torch_lr.LinearLR(o, 0.5, total_iters=20),
    "PolynomialLR": lambda o: torch_lr.PolynomialLR(o, 200, power=2.0),
    "CosineAnnealingLR": lambda o: torch_lr.CosineAnnealingLR(o, 200, 1e-5),
    "OneCycleLR": lambda o: torch_lr.OneCycleLR(o, PEAK, total_steps=200),
    "OneCycleLR-linear": lambda o: torch_lr.OneCycleLR(
        o, PEAK, total_steps=200, anneal_strategy="linear", three_phase=True
    ),
    "LambdaLR": lambda o: torch_lr.LambdaLR(o, lambda t: 0.99**t),
    "StepLR": lambda o: torch_lr.StepLR(o, 25),
}


def closed(rate: float, to: float, shape: str, steps: int = D) -> list[float]:
    """The rates of the next `steps` + 1 updates by the formulas of the papers."""
    left = {
        "linear": lambda done: 1 - done,
        "1-sqrt": lambda done: 1 - math.sqrt(done),
        "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
        "constant": lambda done: 1,
    }[shape]
    return [to + (rate - to) * left(k / steps) for k in range(steps + 1)]


def same(found: Sequence[float], wanted: Sequence[float]) -> None:
    """To 1e-12 of the first rate, and nothing left out."""
    assert len(found) == len(wanted)
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 1e-12 * wanted[0]


def born() -> torch.optim.AdamW:
    layer = torch.nn.Linear(2, 2)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": PEAK / 4}]
    return torch.optim.AdamW(groups, lr=PEAK)


def accelerated(root: Path, name: str) -> Path:
    """What Accelerate saves of a class of torch after STEP updates."""
    optimizer = born()
    scheduler = CLASSES[name](optimizer)
    for _ in range(STEP):
        optimizer.step()
        scheduler.step()
    folder = root / f"checkpoint_{STEP}"
    folder.mkdir(parents=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({}, folder / "random_states_0.pkl")
    return root


def loaded(root: Path, make: Callable[[Any], Any]) -> tuple[Any, Any]:
    optimizer = born()
    scheduler = make(optimizer)
    folder = root / f"checkpoint_{STEP}"
    optimizer.load_state_dict(torch.load(folder / "optimizer.bin", weights_only=False))
    scheduler.load_state_dict(torch.load(folder / "scheduler.bin", weights_only=False))
    return optimizer, scheduler


def stepped(optimizer: Any, scheduler: Any, steps: int = D) -> list[list[float]]:
    """The rates of each param group, of the next `steps` + 1 updates."""
    rates = []
    for _ in range(steps + 1):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return [list(column) for column in zip(*rates, strict=True)]


def as_told(root: Path, words: str) -> tuple[Any, Any]:
    """The LambdaLR that a refusal names, made and loaded as it says."""
    match = re.search(r"make the scheduler LambdaLR\(optimizer, (lambda .*)\)(.*)    (.*)$", words)
    assert match is not None, words
    function = eval(match[1], {"math": math})
    if match[3].startswith("it loads"):
        assert (match[2], match[3]) == ("", f"it loads last_epoch {STEP}")
        return loaded(root, lambda optimizer: torch_lr.LambdaLR(optimizer, function))
    assert match[2] == " once the optimizer is loaded"
    saved = torch.load(root / f"checkpoint_{STEP}" / "scheduler.bin", weights_only=False)
    with pytest.raises(KeyError, match="lr_lambdas"):
        torch_lr.LambdaLR(born(), function).load_state_dict(saved)
    optimizer = born()
    folder = root / f"checkpoint_{STEP}"
    optimizer.load_state_dict(torch.load(folder / "optimizer.bin", weights_only=False))
    return optimizer, torch_lr.LambdaLR(optimizer, function)


def copied(source: Path, folder: Path) -> Path:
    """A run like `source` in `folder`."""
    shutil.copytree(source, folder / "run")
    return folder / "run"
