"""Every kernel, on every backend, dtype and shape, gives what its formula gives in float64."""

from __future__ import annotations

import pytest
import torch

from tests.train.kernels.case import BACKENDS, Case, check, clone, skip_without
from tests.train.kernels.table import CASES
from train.kernels.library import FALLBACKS

ROWS = [(case, dtype) for case in CASES for dtype in case.dtypes]
NAMES = [f"{case.op}-{str(dtype).removeprefix('torch.')}" for case, dtype in ROWS]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "dtype"), ROWS, ids=NAMES)
@pytest.mark.long
def test_an_op_gives_what_its_formula_gives(case: Case, dtype: torch.dtype, backend: str) -> None:
    check(case, dtype, backend, clone)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if dtype is case.dtypes[0] else pytest.mark.slow)
        for case, dtype in ROWS
    ],
    ids=NAMES,
)
@pytest.mark.long
def test_torch_can_trace_an_op(case: Case, dtype: torch.dtype) -> None:
    """What torch traces does not depend on the dtype: each op in its first, the others at night."""
    skip_without("cpu")
    op = getattr(torch.ops.ckptsurgeon, case.op).default
    torch.library.opcheck(op, tuple(case.inputs(case.shapes[-1], dtype, 2)))


def test_every_op_is_in_the_table() -> None:
    assert {case.op for case in CASES} == set(FALLBACKS)
