"""Every kernel, on every backend, dtype and shape, gives what its formula gives in float64."""

from __future__ import annotations

import pytest
import torch

from tests.train.kernels.case import (
    BACKENDS,
    Case,
    assert_close,
    call,
    clones,
    moved,
    skip_without,
    wide,
)
from tests.train.kernels.table import CASES
from train.kernels.library import FALLBACKS

ROWS = [(case, dtype) for case in CASES for dtype in case.dtypes]
NAMES = [f"{case.op}-{str(dtype).removeprefix('torch.')}" for case, dtype in ROWS]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "dtype"), ROWS, ids=NAMES)
def test_an_op_gives_what_its_formula_gives(case: Case, dtype: torch.dtype, backend: str) -> None:
    device = skip_without(backend)
    for shape in case.shapes:
        arguments = case.inputs(shape, dtype, 1)
        exact = [wide(argument) for argument in arguments]
        expected = [*case.reference(*exact), *(exact[i] for i in case.mutated)]
        ours = moved(clones(arguments), device)
        results = [*call(case.op, backend, ours), *(ours[i] for i in case.mutated)]
        for result, wanted in zip(results, expected, strict=True):
            tolerance = case.tolerance[dtype]
            assert_close(result, wanted, tolerance)


@pytest.mark.parametrize(("case", "dtype"), ROWS, ids=NAMES)
def test_torch_can_trace_an_op(case: Case, dtype: torch.dtype) -> None:
    skip_without("cpu")
    op = getattr(torch.ops.ckptsurgeon, case.op).default
    torch.library.opcheck(op, tuple(case.inputs(case.shapes[-1], dtype, 2)))


def test_every_op_is_in_the_table() -> None:
    assert {case.op for case in CASES} == set(FALLBACKS)
