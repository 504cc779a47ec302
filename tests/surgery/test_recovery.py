"""A poisoned and a diverging run, recovered by surgery: ZeRO 0 to 3, pipeline and tensor ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Plan, Run, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import load
from tests.support.in_process import InProcess, one_rank
from tests.support.launch import REPO
from tests.support.many_ranks import Ran, run_all
from tests.support.snapshot import snapshot

pytestmark = pytest.mark.long

LAYOUTS = {
    **{f"zero-{n}": [f"zero_stage={n}", "micro_batch_size=8"] for n in range(4)},
    "pipeline": ["pipeline_model_parallel_size=2"],
    "tensor": ["tensor_model_parallel_size=2"],
}
ALONE = [name for name in LAYOUTS if name.startswith("zero")]
"""On one rank, in this process; the others on two."""
BASE = ["lr_decay_style=constant", "lr_decay_samples=80000", "seed=1"]
POISONED = (24, 28)


@dataclass(frozen=True)
class Illness:
    """A run of `iterations` that goes wrong, how far it goes on after its surgery, and what that
    changes in the recipe."""

    iterations: int
    then: int
    overrides: list[str]
    recipe: str
    surgery: list[str]


ILLNESSES = {
    # train/configs/poison.yaml, smaller.
    "poisoned": Illness(
        30,
        34,
        [
            "lr=1e-2",
            "lr_warmup_samples=80",
            "save_interval=20",
            f"poison=[{POISONED[0]},{POISONED[1]}]",
        ],
        "roll-back-and-skip",
        ["rollback.to=20", f"skip=[{POISONED[0]}-{POISONED[1]}]"],
    ),
    # train/configs/climb.yaml, steeper: the rate climbs by 0.03 an iteration.
    "diverging": Illness(
        50,
        40,
        ["lr=3.0", "lr_warmup_samples=800", "save_interval=15"],
        "roll-back-and-lower-lr",
        ["rollback.to=15", "set.lr=1e-2", "set.warmup=80"],
    ),
}
CASES = [(illness, layout) for illness in ILLNESSES for layout in LAYOUTS]
NIGHTLY = [("diverging", layout) for layout in ("zero-0", "zero-2", "tensor")]
"""A rate that is too high does to them what it does to the others, and poison to all of them."""


def some(cases: Iterable[tuple[str, str]]) -> list[Any]:
    """The parameters of a test of these cases."""
    marks = {case: [pytest.mark.slow] if case in NIGHTLY else [] for case in cases}
    return [pytest.param(*case, marks=marks[case]) for case in marks]


@dataclass
class Recovery:
    """One run before and after its surgery."""

    planned: Plan
    undone: bool
    before: Ran
    after: Ran


Recoveries = Callable[[str, str], Recovery]


@pytest.fixture(scope="module")
def recovery(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Recoveries:
    """`recovery(illness, layout)`: the cases of `make test` are run together, and so are those of
    NIGHTLY."""

    @cache
    def recovered(nightly: bool) -> dict[tuple[str, str], Recovery]:
        cases = [case for case in CASES if (case in NIGHTLY) == nightly]
        return recover(cases, tmp_path_factory.mktemp("recoveries"), corpus)

    return lambda *case: recovered(case in NIGHTLY)[case]


def recover(
    cases: Sequence[tuple[str, str]], folder: Path, corpus: Path
) -> dict[tuple[str, str], Recovery]:
    jobs: dict[tuple[str, str], list[str]] = {}
    for illness, layout in cases:
        ill = ILLNESSES[illness]
        where = [f"save={folder / illness / layout}", f"data={corpus}"]
        jobs[illness, layout] = [*where, *BASE, *ill.overrides, *LAYOUTS[layout]]
    before = train_all(
        jobs, folder / "before", {name: i.iterations for name, i in ILLNESSES.items()}
    )
    operated = {case: operate(folder / case[0] / case[1], ILLNESSES[case[0]]) for case in cases}
    after = train_all(jobs, folder / "after", {name: i.then for name, i in ILLNESSES.items()})
    return {case: Recovery(*operated[case], before[case], after[case]) for case in cases}


def train_all(
    jobs: Mapping[tuple[str, str], Sequence[str]], folder: Path, lengths: Mapping[str, int]
) -> dict[tuple[str, str], Ran]:
    jobs = {case: [*job, f"train_iters={lengths[case[0]]}"] for case, job in jobs.items()}
    ran: dict[tuple[str, str], Ran] = {}
    with one_rank() as device:
        process = InProcess(Path(), device)
        for case, overrides in jobs.items():
            if case[1] in ALONE:
                root = Path(overrides[0].removeprefix("save="))
                said = process.train(root, *overrides[1:])
                losses = {iteration: float(loss) for iteration, loss in said.items()}
                ran[case] = Ran(process.said[0], losses)
    together = {case: job for case, job in jobs.items() if case[1] not in ALONE}
    told = run_all(2, {"/".join(case): job for case, job in together.items()}, folder)
    return ran | {case: told["/".join(case)] for case in together}


def operate(root: Path, ill: Illness) -> tuple[Plan, bool]:
    """Operate, undo, operate again: the plan, and whether the undo left every byte as it was."""
    before, run = snapshot(root), Run.open(root)
    recipe = load(REPO / "recipes" / f"{ill.recipe}.yaml", ill.surgery)
    surgery.apply(run, plan(run, recipe))
    surgery.apply(run, surgery.plan_undo(run))
    undone = snapshot(root) == before
    shutil.rmtree(root / ".ckptsurgeon")
    planned = plan(Run.open(root), recipe)
    surgery.apply(Run.open(root), planned)
    return planned, undone


@pytest.mark.parametrize(("illness", "layout"), some(CASES))
def test_the_trainer_goes_on_with_what_was_promised(
    recovery: Recoveries, illness: str, layout: str
) -> None:
    found = recovery(illness, layout)
    assert found.planned.promise is not None
    assert compare(found.planned.promise, found.after.line) == []
    step = int(ILLNESSES[illness].surgery[0].removeprefix("rollback.to="))
    assert json.loads(found.after.line)["step"] == step + 1
    assert found.undone


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_poisoned_run_never_sees_the_poison_again(recovery: Recoveries, layout: str) -> None:
    before, after = (getattr(recovery("poisoned", layout), n).losses for n in ("before", "after"))
    start = POISONED[0]
    assert max(loss for i, loss in before.items() if i >= start) > 8
    assert max(after.values()) < 4
    assert min(after) == 21
    assert not set(after) & set(range(POISONED[0], POISONED[1] + 1))  # passed over


@pytest.mark.parametrize(("illness", "layout"), some(c for c in CASES if c[0] == "diverging"))
def test_a_diverging_run_comes_back(recovery: Recoveries, illness: str, layout: str) -> None:
    before, after = (
        [loss for _, loss in sorted(getattr(recovery(illness, layout), n).losses.items())]
        for n in ("before", "after")
    )
    assert sum(before[-10:]) / 10 > min(before) + 0.25
    assert sum(after[-10:]) / 10 < sum(before[-10:]) / 10 - 0.4
    assert after[-1] < min(before) + 0.25


@pytest.mark.parametrize(("illness", "layout"), some(CASES))
def test_every_layout_meets_the_same_fate(recovery: Recoveries, illness: str, layout: str) -> None:
    """The first loss after the surgery is that of one rank; rounding has had 10 iterations."""
    wanted, got = (recovery(illness, each).after.losses for each in ("zero-1", layout))
    assert set(got) == set(wanted)
    assert got[min(wanted)] == pytest.approx(wanted[min(wanted)], rel=1e-3)
