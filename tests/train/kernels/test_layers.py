"""The kernels of the layers: nan stays in its row, dropout is drawn again, gradients are right."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.launch import REPO
from tests.train.kernels.case import BACKENDS, call, skip_without
from tests.train.kernels.layer_cases import LAYER_CASES
from train.kernels import bias_dropout_add_layer_norm

FORWARD = {case.op: case for case in LAYER_CASES if "backward" not in case.op}
SHAPE = (5, 37)  # whole vectors, and a tail shorter than one
GRADCHECK = """
import json, sys, torch
from tests.train.kernels.layer_cases import LAYER_CASES
names = json.loads(sys.argv[1])
for case in LAYER_CASES:
    if case.op not in names:
        continue
    arguments = case.inputs((3, 3), torch.float64, 1)
    floats = [a for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()]
    for tensor in floats:
        tensor.requires_grad_()
    op = getattr(torch.ops.ckptsurgeon, case.op).default
    assert torch.autograd.gradcheck(lambda *a: op(*a)[:2], arguments) if "norm" in case.op else \
        torch.autograd.gradcheck(op, arguments)
    print(case.op)
"""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("op", FORWARD)
def test_a_nonfinite_element_shows_in_its_row_and_in_no_other(
    op: str, bad: float, backend: str
) -> None:
    skip_without(backend)
    rows, columns = SHAPE
    for row, column in ((0, 0), (1, 31), (2, 32), (3, columns - 1), (4, 0), (rows - 1, 36)):
        arguments = FORWARD[op].inputs(SHAPE, torch.float32, 1)
        clean = call(op, backend, [a.clone() if isinstance(a, Tensor) else a for a in arguments])
        arguments[0][row, column] = bad
        if op == "softmax_cross_entropy_":
            arguments[1][row] = column
        # Query `row` of 5 sees the first row + 33 of 37 keys; the rest has no part in it.
        hidden = op == "causal_softmax" and column >= row + 33
        for ours, wanted in zip(call(op, backend, arguments), clean, strict=True):
            finite = torch.isfinite(ours).view(rows, -1).all(1)
            assert bool(finite[row]) == hidden
            finite[row] = True
            assert finite.all()
            others = [i for i in range(rows) if i != row]
            assert torch.equal(ours.view(rows, -1)[others], wanted.view(rows, -1)[others])


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_from_zero_gelu_is_flat(backend: str) -> None:
    """A diverging run's activations: a rest of the gate times their third power is no gradient."""
    device = skip_without(backend)
    far = torch.tensor([[-1e20, -1e16, -1e13, -1e4, -17, 17, 1e4, 1e13, 1e16, 1e20]], device=device)
    bias = torch.zeros(10, device=device)
    dx, dbias = call("bias_gelu_backward", backend, [torch.ones_like(far), far, bias])
    for found in (dx[0], dbias):
        assert found.tolist() == pytest.approx([0.0] * 5 + [1.0] * 5, abs=1e-30)


@pytest.mark.long
def test_the_gradients_of_the_formulas_are_those_of_finite_differences() -> None:
    names = sorted(set(FORWARD) - {"softmax_cross_entropy_"})  # it makes its gradient itself
    done = subprocess.run(
        [sys.executable, "-c", GRADCHECK, json.dumps(names)],
        cwd=REPO,
        env={**os.environ, "CKPTSURGEON_KERNELS": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(set(done.stdout.split())) == names


@pytest.mark.parametrize("op", [case.op for case in LAYER_CASES if "causal" not in case.op])
def test_a_result_does_not_depend_on_the_number_of_threads(op: str, threads: None) -> None:
    case = next(case for case in LAYER_CASES if case.op == op)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(call(op, "cpu", case.inputs((333, 517), torch.float32, 5)))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def dropped(seed: int, p: float) -> tuple[Tensor, Tensor]:
    """What is left of ones, and its gradient, with this state of torch's generator."""
    skip_without("cpu")
    torch.manual_seed(seed)
    x = torch.ones(64, 1001, requires_grad=True)
    zeros, ones = torch.zeros(1001), torch.ones(1001)
    _, s = bias_dropout_add_layer_norm(x, zeros, torch.zeros(64, 1001), ones, zeros, 1e-5, p)
    s.backward(torch.ones_like(s))
    assert x.grad is not None
    return s.detach(), x.grad


def test_dropout_drops_its_share_keeps_the_mean_and_is_the_same_in_backward() -> None:
    s, gradient = dropped(1, 0.25)
    assert torch.equal(s, gradient)
    assert sorted(set(s.flatten().tolist())) == [0.0, pytest.approx(4 / 3)]
    share = float((s == 0).double().mean())
    assert share == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / s.numel()))
    for sums in ((s == 0).sum(0) / 64, (s == 0).sum(1) / 1001):
        assert float(sums.double().mean()) == pytest.approx(share)
        assert float(sums.min()) > 0.0 and float(sums.max()) < 0.65


def test_dropout_follows_the_seed_of_torch_and_differs_between_calls() -> None:
    first, again, other = dropped(1, 0.5)[0], dropped(1, 0.5)[0], dropped(2, 0.5)[0]
    assert torch.equal(first, again)
    assert float(((first == 0) == (other == 0)).double().mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("bias_gelu", [torch.ones(4, 4).t()[:, :2], torch.ones(2)], "x must be contiguous"),
        ("bias_gelu", [torch.ones(2, 3), torch.ones(2)], "bias must have one element per column"),
        ("bias_gelu", [torch.ones(2, 2, dtype=torch.float64), torch.ones(2).double()], "float32"),
        ("bias_gelu", [torch.ones(2, 2), torch.ones(2).half()], "bias must have the input's dtype"),
        ("causal_softmax", [torch.ones(3, 2), 1.0], "queries <= keys"),
        ("softmax_cross_entropy_", [torch.ones(1, 3), torch.tensor([3]), 1.0], "target 3 is not"),
        ("softmax_cross_entropy_", [torch.ones(1, 3), torch.tensor([-1]), 1.0], "target -1 is not"),
    ],
)
def test_what_a_kernel_cannot_compute_is_refused(
    op: str, arguments: list[object], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(op, "cpu", arguments)
