"""AdamW, SGDW and LAMB compute their papers' formulas, whole or in partitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from train.lamb import LAMB, Fragment
from train.sgdw import SGDW

LR, DECAY, STEPS = 0.01, 0.1, 5
Update = Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]


def adam_direction(g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
    state["m"] = 0.9 * state.get("m", torch.zeros_like(g)) + 0.1 * g
    state["v"] = 0.95 * state.get("v", torch.zeros_like(g)) + 0.05 * g**2
    mean, square = state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.95**step)
    return mean / (square.sqrt() + 1e-6)


def adamw(p: Tensor, g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
    return p - LR * (adam_direction(g, state, step) + DECAY * p)


def sgdw(p: Tensor, g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
    state["b"] = 0.9 * state.get("b", torch.zeros_like(g)) + g
    return p - LR * (state["b"] + DECAY * p)


def lamb(p: Tensor, g: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
    update = adam_direction(g, state, step) + DECAY * p
    return p - LR * (p.norm() / update.norm() if p.norm() > 0 else 1.0) * update


ADAM = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": DECAY}
CASES = {
    "adamw": (lambda ps: torch.optim.AdamW(ps, **ADAM), adamw),
    "sgdw": (lambda ps: SGDW(ps, lr=LR, momentum=0.9, weight_decay=DECAY), sgdw),
    "lamb": (lambda ps: LAMB(ps, **ADAM), lamb),
    "unadapted": (lambda ps: LAMB([{"params": ps, "layer_adaptation": False}], **ADAM), adamw),
}


def gradients(shapes: list[tuple[int, ...]]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]


@pytest.mark.parametrize("name", CASES)
def test_the_update_is_the_formula_in_double_precision(name: str) -> None:
    make, formula = CASES[name]
    torch.manual_seed(2)
    params = [nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.zeros(3))]
    wanted = [p.detach().double() for p in params]
    states: list[dict[str, Tensor]] = [{}, {}]
    optimizer = make(params)
    for step, grads in enumerate(gradients([(7, 5), (3,)]), start=1):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        wanted = [
            formula(p, g.double(), state, step)
            for p, g, state in zip(wanted, grads, states, strict=True)
        ]
    for p, w in zip(params, wanted, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=2e-6, atol=2e-7)


def test_the_decay_of_sgdw_is_decoupled_from_the_momentum() -> None:
    """With gradients of 0 the weights shrink by lr x decay a step, which L2 in the momentum would
    pile up to ten times that: the difference between OPT's run 12.41 and what was meant."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = SGDW([p], lr=LR, momentum=0.9, weight_decay=DECAY)
    for _ in range(100):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert float(p.detach()) == pytest.approx((1 - LR * DECAY) ** 100, rel=1e-12)


def test_sgdw_without_momentum_keeps_no_buffer() -> None:
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    optimizer = SGDW([p], lr=LR)
    optimizer.step()
    assert float(p.detach()) == pytest.approx(1 - LR)
    assert list(optimizer.state[p]) == ["step"]


def test_a_flat_partition_takes_the_steps_of_the_whole_parameters() -> None:
    """Two parameters behind each other, with one element of padding between them and one at the
    end: the update of each is that of LAMB on the parameter alone."""
    torch.manual_seed(4)
    parts = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(10 * torch.randn(5))]
    flat = nn.Parameter(torch.full((19,), 9.0))
    places = [slice(0, 12), slice(13, 18)]
    for p, place in zip(parts, places, strict=True):
        flat.data[place] = p.detach().flatten()
    whole, partition = LAMB(parts, **ADAM), LAMB([flat], **ADAM)
    partition.set_partition(flat, [Fragment(0, 0, 12), Fragment(1, 13, 5)], 2, ())
    for grads in gradients([(3, 4), (5,)]):
        flat.grad = torch.zeros(19)
        for p, g, place in zip(parts, grads, places, strict=True):
            p.grad, flat.grad[place] = g, g.flatten()
        whole.step()
        partition.step()
        with torch.no_grad():
            for p, place in zip(parts, places, strict=True):
                torch.testing.assert_close(flat[place], p.flatten())
    assert flat.detach()[[12, 18]].tolist() == [9.0, 9.0]
