"""K2 rounds as torch rounds, says nan where there is one, and steps as torch steps for long."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.kernels.case import BACKENDS, call, skip_without
from train.kernels import adamw_flat_

LENGTH = 4096 + 5
HYPER = (1e-3, 0.9, 0.95, 1e-8, 0.1, 1)


def arguments(p: Tensor, g: Tensor, out: Tensor | None = None, **hyper: Any) -> list[Any]:
    lr = hyper.get("lr", HYPER[0])
    moments = [torch.zeros_like(p), torch.zeros_like(p)]
    outs = [] if out is None else [out]
    return [[p], *([moment] for moment in moments), [g], outs, torch.tensor(1.0), lr, *HYPER[1:]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_low_precision_copy_is_rounded_as_torch_rounds(
    backend: str, dtype: torch.dtype
) -> None:
    device = skip_without(backend)
    generator = torch.Generator().manual_seed(4)
    exponents = torch.randint(-50, 20, (LENGTH,), generator=generator)
    p = torch.randn(LENGTH, generator=generator) * 2.0**exponents  # half's subnormals, and overflow
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.0, 65520.0, -3e38, 2**-25])
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    p = torch.cat([p, ties, special]).to(device)
    out = torch.empty(p.shape, dtype=dtype, device=device)
    call("adamw_flat_", backend, arguments(p, torch.zeros_like(p), out, lr=0.0))
    assert torch.equal(torch.nan_to_num(out, nan=77.0), torch.nan_to_num(p.to(dtype), nan=77.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 4095, LENGTH - 1])
def test_a_nonfinite_gradient_is_seen_in_the_statistics(
    backend: str, bad: float, where: int
) -> None:
    device = skip_without(backend)
    p, g = torch.ones(LENGTH, device=device), torch.ones(LENGTH, device=device)
    g[where] = bad
    ((stats,),) = call("adamw_flat_", backend, arguments(p, g))
    assert not any(math.isfinite(value) for value in stats[:2].tolist())
    assert int(p.isfinite().sum()) == LENGTH - 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_and_the_update_are_counted_apart(backend: str, dtype: torch.dtype) -> None:
    """A first step moves each weight that has a gradient by 1, before rate and decay. 4,096 of them
    are added as floats, on four lanes at least; one more or less would be four times the bound."""
    device = skip_without(backend)
    p, g = torch.ones(LENGTH, device=device), torch.ones(LENGTH, device=device, dtype=dtype)
    g[3:4099:8], g[5] = 0.0, -0.0
    zeros = int((g == 0).sum())
    ((stats,),) = call("adamw_flat_", backend, arguments(p, g, lr=7e-5))
    assert stats.tolist()[4:] == [pytest.approx(LENGTH - zeros, rel=4096 / 4 * 2**-24), zeros]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fifty_steps_are_torchs_fifty_steps(backend: str) -> None:
    device = skip_without(backend)
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(LENGTH, generator=generator).to(device)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], HYPER[0], HYPER[1:3], HYPER[3], HYPER[4])
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 51):
        gradient = torch.randn(LENGTH, generator=generator).to(device)
        theirs.grad = gradient * 0.5
        optimizer.step()
        mul = torch.tensor(0.5)
        call("adamw_flat_", backend, [[p], [m], [v], [gradient], [], mul, *HYPER[:5], step])
    assert float((p - theirs.detach()).abs().max()) < 5e-6  # ten units in the last place


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_beta1_zero_nothing_of_the_old_moment_is_left(backend: str) -> None:
    """OPT's fake SGD sets beta1 to 0 in the middle of a run, and means it."""
    device = skip_without(backend)
    generator = torch.Generator().manual_seed(6)
    p, old, gradient = torch.randn(3, LENGTH, generator=generator).to(device)
    m, v = old * 1e4, old.abs()
    call_with = [[p], [m], [v], [gradient], [], torch.tensor(1.0), HYPER[0], 0.0]
    call("adamw_flat_", backend, [*call_with, *HYPER[2:5], 9])
    assert torch.equal(m, gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
def test_a_negative_multiplier_leaves_all_as_it_is(backend: str, bad: float) -> None:
    device = skip_without(backend)
    p, g = torch.ones(LENGTH, device=device), torch.full((LENGTH,), bad, device=device)
    words = arguments(p, g, torch.full_like(p, 3.0))
    words[5] = torch.tensor(-1.0)
    (stats,) = call("adamw_flat_", backend, words)
    assert stats.tolist() == [[0.0] * 6]
    for (tensor,), value in zip((*words[:3], words[4]), (1.0, 0.0, 0.0, 3.0), strict=True):
        assert torch.equal(tensor, torch.full_like(tensor, value))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: [torch.ones(3, dtype=torch.bfloat16)]}, "p, m and v must be"),
        ({1: [torch.zeros(2)]}, "p, m and v must be"),
        ({1: [torch.zeros(3)] * 2}, "p, m, v, g and out must be as many"),
        ({3: [torch.zeros(4)]}, "g must be"),
        ({4: [torch.zeros(4)]}, "out must be"),
        ({4: [torch.zeros(3)] * 2}, "p, m, v, g and out must be as many"),
        ({5: torch.ones(2)}, "grad_mul must be"),
        ({11: 0}, "step counts from 1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[int, Any], says: str) -> None:
    words = arguments(torch.ones(3), torch.ones(3))
    for position, value in change.items():
        words[position] = value
    with pytest.raises(RuntimeError, match=f"adamw_flat_: {says}"):
        call("adamw_flat_", "cpu", words)


def test_the_public_function_is_the_op() -> None:
    p, g = torch.ones(9), torch.full((9,), 0.25)
    words = arguments(p.clone(), g)
    (expected,) = call("adamw_flat_", "fallback", words)
    stats = adamw_flat_(
        [p], [torch.zeros(9)], [torch.zeros(9)], [g], [], torch.tensor(1.0),
        lr=HYPER[0], betas=(HYPER[1], HYPER[2]), eps=HYPER[3], weight_decay=HYPER[4], step=1,
    )  # fmt: skip
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(p, words[0][0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tensors_in_a_call_become_what_each_becomes_alone(
    backend: str, dtype: torch.dtype
) -> None:
    """Bit for bit: the weights, the moments, the low-precision copies and the statistics."""
    device = skip_without(backend)
    generator = torch.Generator().manual_seed(7)
    sizes = [5, 4097, 0, 64, *range(1, 80)]

    def made(kind: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(n, generator=generator).to(device, kind) for n in sizes]

    p, m, v, g, out = made(), made(), [x.square() for x in made()], made(dtype), made(dtype)
    mul = torch.tensor(0.25)
    alone = [[x.clone() for x in kind] for kind in (p, m, v, g, out)]
    rows = [
        call("adamw_flat_", backend, [*([x] for x in each), mul, *HYPER[:5], 3])[0][0]
        for each in zip(*alone, strict=True)
    ]
    (stats,) = call("adamw_flat_", backend, [p, m, v, g, out, mul, *HYPER[:5], 3])
    assert torch.equal(stats, torch.stack(rows))
    for ours, theirs in zip((p, m, v, out), (*alone[:3], alone[4]), strict=True):
        assert all(map(torch.equal, ours, theirs))
