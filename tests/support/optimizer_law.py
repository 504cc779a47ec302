"""The law of `reset moments`, for any optimizer class: what it saved, reset, steps as a new one.

A run of the Hugging Face layout is made by hand, as it keeps `optimizer.state_dict()` as it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
UPDATES = 6
"""How many updates after the reset are compared: some optimizers use a buffer later than others."""


@dataclass(frozen=True)
class Outcome:
    """What a reset did: `in place`, `left out` where the states go, or why it was refused."""

    how: str
    state: tuple[str, ...]
    name: str


class Wide(torch.nn.Sequential):
    """Matrices, an embedding and vectors; 8-bit states begin at 4,096 elements."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            torch.nn.Embedding(80, 64), torch.nn.Linear(64, 72), torch.nn.LayerNorm(72)
        )


class Small(torch.nn.Sequential):
    """The same kinds of parameters, smaller."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 12), torch.nn.LayerNorm(12))


def update(model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    """One step with gradients that depend on `seed` alone, and on the weights where it asks for
    second derivatives."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(p.shape, generator=generator) * 0.1 for p in model.parameters()]
    torch.manual_seed(1000 + seed)
    if getattr(optimizer, "second_order", False):
        optimizer.zero_grad()
        pairs = zip(model.parameters(), gradients, strict=True)
        loss = torch.stack([(p * g).sum() + p.pow(3).sum() * 0.05 for p, g in pairs]).sum()
        loss.backward(create_graph=True)
    else:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
    try:
        optimizer.step()
    except (TypeError, AttributeError) as error:
        if "closure" not in str(error):
            raise
    except Exception as error:
        if type(error).__name__ != "NoClosureError":
            raise
    else:
        return
    optimizer.step(lambda: torch.tensor(0.5 + seed * 0.01))


def trained(kind: Callable[[], torch.nn.Module], make: Make, updates: int = 7) -> tuple[Any, Any]:
    """A model and its optimizer after some updates."""
    model = kind()
    optimizer = make(model)
    for seed in range(updates):
        update(model, optimizer, seed)
    return model, optimizer


def save(root: Path, model: torch.nn.Module, optimizer: Any, step: int = 7) -> Path:
    """`checkpoint-<step>` of a run: the optimizer's state as it is, and the Trainer's own file."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    groups = optimizer.param_groups
    alike = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in groups]
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(alike, lr=1.0), lambda _: 1.0)
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder / "optimizer.pt"


def next_weights(model: torch.nn.Module, optimizer: Any) -> list[list[torch.Tensor]]:
    """The weights after each of the next updates."""
    out = []
    for seed in range(100, 100 + UPDATES):
        update(model, optimizer, seed)
        out.append([p.detach().clone() for p in model.parameters()])
    return out


def apart(left: Iterable[list[torch.Tensor]], right: Iterable[list[torch.Tensor]]) -> float:
    """The largest difference of two runs, as a share of the largest weight."""
    pairs = [pair for a, b in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def outcome(root: Path, kind: Callable[[], torch.nn.Module], make: Make) -> Outcome:
    """What becomes of a reset. Where it is done, the next updates are those of a new optimizer on
    the same weights, and undo brings every byte back; where it is refused, nothing changed."""
    model, optimizer = trained(kind, make)
    file = save(root, model, optimizer)
    weights = copy.deepcopy(model.state_dict())
    before = snapshot(root)
    saved = optimizer.state_dict()
    states = [each for each in saved.get("state", {}).values() if isinstance(each, dict)]
    keys = tuple(sorted({str(key) for each in states for key in each}))
    name = ""
    plan = None
    try:
        name = Run.open(root).checkpoint(7).state().promise.optimizer or ""
        recipe = from_data({"reset": ["moments"]})
        if not surgery.plan(Run.open(root), recipe).empty:
            plan = operate(root, {"reset": ["moments"]})
    except SurgeryError as error:
        assert snapshot(root) == before
        return Outcome(f"refused: {error.what}", keys, name)

    def alike() -> tuple[Any, Any]:
        twin = kind()
        twin.load_state_dict(weights)
        fresh = make(twin)
        twin.load_state_dict(weights)  # some optimizers write the weights when they begin
        return twin, fresh

    wanted = next_weights(*alike())
    twin, loaded = alike()
    loaded.load_state_dict(torch.load(file, weights_only=False))
    assert apart(next_weights(twin, loaded), wanted) <= 1e-6
    if plan is None:
        return Outcome("keeps no state", keys, name)
    take_back(root, before)
    left_out = any(str(change.new) == "absent" for change in plan.changes)  # type: ignore[union-attr]
    return Outcome("left out" if left_out else "in place", keys, name)
