"""The CUDA kernels give what their formulas give, run thread by thread on a CPU: in any order of
the threads of a block, and within the memory that they were given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.launch import REPO
from tests.train.kernels.cuda_on_cpu.build import build
from tests.train.kernels.table import CASES
from train.kernels.build import CannotBuildError, Toolchain, find_toolchain, source_folder

ROWS = sum(len(case.dtypes) for case in CASES)
# Kernel, a line of its sources, and what a mistake would make of it.
BUGS = {
    "a block does not wait before it reads its sums": (
        "causal_softmax",
        "parts[threadIdx.x / 32] = x;\n  __syncthreads();",
        "parts[threadIdx.x / 32] = x;",
    ),
    "a block does not wait before it writes its sums anew": (
        "bias_dropout_add_layer_norm",
        "__syncthreads();  // `parts` of an earlier call has been read",
        "",
    ),
    "half of a warp is left out of a sum": ("grad_norm_check", "int i = 16;", "int i = 8;"),
    "the tail is left out": ("adamw_flat", "i = 4 * fours + thread;", "i = 4 * fours + threads;"),
    "four at once where they are not aligned": ("grad_norm_check", "aligned ? n / 4 : 0", "n / 4"),
    "the last four go over the end": ("adamw_flat", "? n / 4 :", "? (n + 3) / 4 :"),
    "the row goes one too far": ("causal_softmax", "queries + 1 +", "queries + 2 +"),
    "a column too many": ("bias_gelu", "if (column >= columns)", "if (column > columns)"),
    "wide where the row does not allow it": ("causal_softmax", "columns % N == 0 && ", ""),
    "wide where a pointer does not allow it": (
        "causal_softmax",
        " && bits % (N * sizeof(T)) == 0",
        "",
    ),
    "the first pack is taken for another one": (
        "causal_softmax",
        "first ? held : load<N>(from + i)",
        "held",
    ),
}
ORDERS = ("forward", "reverse", "shuffled")
OPTIONS = {"forward": ("--guarded",), "reverse": (), "shuffled": ()}
Runs = Callable[[str], subprocess.CompletedProcess[str]]


def toolchain() -> Toolchain:
    try:
        return find_toolchain()
    except CannotBuildError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def library() -> Path:
    return build(source_folder(), toolchain())


def run(library: Path, order: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.train.kernels.cuda_on_cpu", str(library), *options],
        cwd=REPO,
        env={**os.environ, "EMULATED_ORDER": order, "CKPTSURGEON_KERNELS": "require"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def runs(library: Path) -> Runs:
    """What the rows print in one order, run once."""
    return cache(lambda order: run(library, order, *OPTIONS[order]))


def sound(done: subprocess.CompletedProcess[str], rows: int = ROWS) -> None:
    assert done.stdout.splitlines()[-1:] == [f"{rows} rows, 0 failed"], done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.long
def test_a_kernel_gives_what_its_formula_gives() -> None:
    """One alone: to compile all takes a minute."""
    library = build(source_folder(), toolchain(), "causal_softmax")
    rows = sum(len(case.dtypes) for case in CASES if case.op.startswith("causal_softmax"))
    assert rows
    sound(run(library, "forward", *OPTIONS["forward"]), rows)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_every_kernel_gives_what_its_formula_gives(runs: Runs, order: str) -> None:
    sound(runs(order))


@pytest.mark.slow
def test_every_kernel_takes_tensors_that_begin_anywhere(library: Path) -> None:
    sound(run(library, "forward", "--shifted"))


@pytest.mark.slow
def test_every_kernel_gives_the_same_bits_in_any_order_of_warps_and_blocks(runs: Runs) -> None:
    """So ranks that hold the same parameters keep them equal, and a replay is exact."""
    assert len(digests(runs("reverse"))) == ROWS
    assert digests(runs("reverse")) == digests(runs("shuffled"))


def digests(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if len(line.split()[-1]) == 64]


@pytest.mark.slow
def test_a_sum_in_the_order_in_which_blocks_come_is_caught() -> None:
    """Right to rounding, so that the table lets it pass: an atomic in place of a partial sum."""
    atomic = {
        "store(partials + strip.number * columns + column, sum);": (
            "for (int k = 0; k < N; ++k) atomicAdd(partials + column + k, sum.at[k]);"
        ),
        "Tensor partials = torch::stable::new_empty": "Tensor partials = torch::stable::new_zeros",
    }
    changed = set()

    def change(text: str) -> str:
        for right, wrong in atomic.items():
            if right in text:
                changed.add(right)
                text = text.replace(right, wrong)
        return text

    library = build(source_folder(), toolchain(), "bias_gelu", change)
    assert changed == set(atomic)
    forward, reverse = (run(library, order) for order in ("forward", "reverse"))
    assert (forward.returncode, reverse.returncode) == (0, 0)
    assert digests(forward) != digests(reverse)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_a_kernel_is_caught(bug: str) -> None:
    kernel, right, wrong = BUGS[bug]
    changed = 0

    def change(text: str) -> str:
        nonlocal changed
        changed += text.count(right)
        return text.replace(right, wrong)

    library = build(source_folder(), toolchain(), kernel, change)
    assert changed
    outcomes = [run(library, order, *OPTIONS[order]) for order in ("forward", "reverse")]
    outcomes.append(run(library, "forward", "--shifted"))
    assert any(done.returncode for done in outcomes)
    assert not any("Traceback" in done.stderr for done in outcomes)
