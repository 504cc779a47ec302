"""Products and the loss of the output matrix, against torch's own in float64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.kernels.case import assert_close, skip_without
from tests.train.kernels.layer_cases import normal
from train.kernels import linear, linear_cross_entropy

LOSS: Any = importlib.import_module("train.kernels.linear_cross_entropy")
PRODUCT: Any = importlib.import_module("train.kernels.linear")


@pytest.fixture(params=["onednn", "torch"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With either library, whichever this machine would choose."""
    if request.param == "onednn" and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(PRODUCT, "_onednn_is_faster", lambda: request.param == "onednn")


def gradients(x: Tensor, weight: Tensor, function: Any) -> list[Tensor]:
    """The result of `function(x, weight)` and the two gradients of half its squared sum."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    result = function(x, weight)
    (result.square().sum() / 2).backward()
    assert x.grad is not None and weight.grad is not None
    return [result.detach(), x.grad, weight.grad]


@pytest.mark.parametrize(("inputs", "outputs"), [(33, 7), (5, 130), (1, 1), (64, 64)])
@pytest.mark.parametrize("leading", [(1,), (3, 7), (2, 0)])
def test_a_product_and_its_gradients_are_torchs(
    inputs: int, outputs: int, leading: tuple[int, ...], product: None
) -> None:
    skip_without("cpu")
    x = normal((*leading, inputs), torch.float32, 1)
    weight = normal((outputs, inputs), torch.float32, 2)
    exact = gradients(x.double(), weight.double(), F.linear)
    for ours, wanted in zip(gradients(x, weight, linear), exact, strict=True):
        assert ours.is_contiguous()
        assert_close(ours, wanted, 2e-6)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("rows", [1, 6, 7, 8, 20])  # chunks of 7: none whole, whole, a rest
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_the_chunked_loss_and_its_gradients_are_torchs(
    rows: int, dtype: torch.dtype, tolerance: float, product: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("cpu")
    vocabulary = 131
    monkeypatch.setattr(LOSS, "CHUNK_BYTES", 7 * vocabulary * dtype.itemsize)
    targets = torch.arange(rows) * 37 % vocabulary
    x, weight = normal((rows, 16), dtype, 1), normal((vocabulary, 16), dtype, 2)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), targets)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets)

    wanted = gradients(x.double(), weight.double(), exact)
    found = gradients(x, weight, ours)
    assert found[0].dtype == torch.float32
    assert [tensor.dtype for tensor in found[1:]] == [dtype, dtype]
    for tensor, other in zip(found, wanted, strict=True):
        assert_close(tensor, other, tolerance)


def test_a_float16_gradient_does_not_vanish_before_the_loss_scale_reaches_it() -> None:
    skip_without("cpu")
    rows, vocabulary = 4096, 64
    x = normal((rows, 8), torch.float32, 1).requires_grad_()
    half = x.detach().half().requires_grad_()
    weight, targets = normal((vocabulary, 8), torch.float32, 2, 0.01), torch.zeros(rows).long()
    F.cross_entropy(F.linear(x, weight), targets).backward()
    (linear_cross_entropy(half, weight.half(), targets) * 2.0**16).backward()
    assert x.grad is not None and half.grad is not None
    # Unscaled they are about 1e-6, of which float16 keeps a bit or two.
    assert_close(half.grad.double() / 2**16, x.grad.double(), 5e-3)


@pytest.mark.parametrize("chunk", [2**30, 2**18])
def test_a_float16_gradient_of_many_rows_does_not_overflow(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row pulls the same weights the same way; the mean of it is 1, the sum 262144."""
    skip_without("cpu")
    monkeypatch.setattr(LOSS, "CHUNK_BYTES", chunk)
    rows, vocabulary = 2**18, 8
    x, targets = torch.ones(rows, 2).half(), torch.zeros(rows).long()
    weight = torch.zeros(vocabulary, 2).half().requires_grad_()
    linear_cross_entropy(x, weight, targets).backward()
    wanted = torch.full((vocabulary, 2), 1 / vocabulary)
    wanted[0] -= 1
    assert weight.grad is not None
    assert_close(weight.grad, wanted, 1e-3)


def test_without_gradients_the_loss_alone_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSS, "_chunks", None)  # what would make them
    monkeypatch.setattr(LOSS, "CHUNK_BYTES", 2 * 9 * 4)
    x, weight = normal((5, 8), torch.float32, 1), normal((9, 8), torch.float32, 2)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, torch.arange(5))
    assert not loss.requires_grad
    assert_close(loss, F.cross_entropy(x.double() @ weight.double().t(), torch.arange(5)), 1e-6)


def test_a_chunk_follows_the_vocabulary_on_a_cpu_and_has_many_rows_elsewhere() -> None:
    def rows(vocabulary: int, device: str) -> list[int]:
        x = torch.empty(10_000, 8, dtype=torch.bfloat16, device=device)
        weight = torch.empty(vocabulary, 8, dtype=torch.bfloat16, device=device)
        return [len(range(10_000)[part]) for part in LOSS._parts(x, weight)]

    assert rows(250_880, "meta") == rows(256, "meta") == [4096, 4096, 1808]
    assert rows(250_880, "cpu")[0] == 64 * 2**20 // (250_880 * 2)
    assert rows(256, "cpu") == [10_000]
