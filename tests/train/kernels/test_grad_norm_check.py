"""K1 finds every nonfinite element, overflows nowhere, and does not depend on the threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.train.kernels.case import BACKENDS, call

LENGTH = 3 * 4096 + 5  # three blocks and a tail shorter than a vector


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 4095, 4096, LENGTH - 6, LENGTH - 1])
def test_a_nonfinite_element_is_counted(
    backend: str, dtype: torch.dtype, bad: float, where: int
) -> None:
    grad = torch.ones(LENGTH, dtype=dtype)
    grad[where] = bad
    ((result,),) = call("grad_norm_check", backend, [[grad]])
    assert result[1] == 1
    assert not math.isfinite(float(result[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_and_smallest_numbers_are_summed_exactly(
    backend: str, dtype: torch.dtype
) -> None:
    for value in (torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal, 0.0):
        grad = torch.full((9,), value, dtype=dtype)
        ((result,),) = call("grad_norm_check", backend, [[grad]])
        assert float(result[0]) == pytest.approx(9 * value**2, rel=1e-15)
        assert result[1] == 0


def test_the_sum_is_the_same_for_any_number_of_threads(threads: None) -> None:
    grad = torch.randn(200_001, generator=torch.Generator().manual_seed(3))
    results = []
    for count in (1, 2, 3, 1):
        torch.set_num_threads(count)
        results.append(call("grad_norm_check", "cpu", [[grad]])[0])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 4096])
def test_blocks_that_are_read_in_turns_have_the_sums_that_each_has_alone(
    threads: None, dtype: torch.dtype, beyond: int
) -> None:
    torch.set_num_threads(1)  # so that one thread gets a whole turn
    values = torch.randn(4 * 16 * 4096 + beyond, generator=torch.Generator().manual_seed(5))
    grad = values.to(dtype)
    grad[70_000] = grad[200_000] = math.nan
    (together,) = call("grad_norm_check", "cpu", [[grad]])
    each = call("grad_norm_check", "cpu", [list(grad.split(4096))])[0]
    assert together[0][1] == each[:, 1].sum() == 2
    grad[70_000] = grad[200_000] = 0
    (together,) = call("grad_norm_check", "cpu", [[grad]])
    each = call("grad_norm_check", "cpu", [list(grad.split(4096))])[0]
    total = 0.0
    for squares, _ in each.tolist():
        total += squares
    assert together[0].tolist() == [total, 0]


@pytest.mark.parametrize("strange", [torch.ones(4, 4).t()[:2], torch.ones(3, dtype=torch.int32)])
def test_what_it_cannot_read_is_refused(strange: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"grad_norm_check: grad must be"):
        call("grad_norm_check", "cpu", [[strange]])
