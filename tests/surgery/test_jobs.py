"""However many threads read and edit, the plan, the refusal and the bytes are the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.layout import ranks
from ckptsurgeon import Run, apply, plan, plan_undo
from ckptsurgeon.disk.mount import MOUNTS, threads
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.workers import files_at_once, side_by_side
from tests.support.snapshot import differs, snapshot

SHARDS = 12
RECIPES = (
    {"set": {"lr": 3e-5}},
    {"set": {"beta2": 0.9}, "reset": ["moments"]},
    {"rollback": {"to": 95000}, "set": {"eps": 1e-6}},
)
JOBS = st.sampled_from([2, 3, 8, 32])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("jobs") / "run"
    ranks(root, SHARDS)
    return root


def made(root: Path, make: Callable[[Run], Plan]) -> Plan | str:
    """The plan, or the refusal."""
    try:
        return make(Run.open(root))
    except SurgeryError as error:
        return f"{error}"


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    recipe=st.sampled_from(RECIPES), jobs=JOBS, cut=st.sets(st.integers(0, SHARDS - 1), max_size=3)
)
def test_the_plan_or_the_refusal_is_that_of_one_thread(
    saved: Path, recipe: dict[str, object], jobs: int, cut: set[int]
) -> None:
    """Of several damaged shards the first is named, whichever thread meets its own first."""
    whole = {}
    try:
        for path in sorted(saved.glob("*95500/*optim*")):
            if len(whole) <= max(cut, default=-1):
                whole[path] = path.read_bytes()
        for number, path in enumerate(whole):
            if number in cut:
                path.write_bytes(whole[path][:-30])
        wanted = made(saved, lambda run: plan(run, from_data(recipe), jobs=1))
        found = made(saved, lambda run: plan(run, from_data(recipe), jobs=jobs))
        assert found == wanted
        assert isinstance(found, str) is (bool(cut) and "rollback" not in recipe)
    finally:
        for path, data in whole.items():
            path.write_bytes(data)


@pytest.mark.parametrize("recipe", RECIPES, ids=["values", "moments", "rollback"])
def test_an_apply_and_its_undo_leave_the_bytes_of_one_thread(
    saved: Path, tmp_path: Path, recipe: dict[str, object]
) -> None:
    ends = []
    before = snapshot(saved)
    for jobs in (1, 32):
        root = tmp_path / f"{jobs}" / "run"
        shutil.copytree(saved, root)
        apply(Run.open(root), plan(Run.open(root), from_data(recipe), jobs=jobs), jobs=jobs)
        after = snapshot(root)
        undo = plan_undo(Run.open(root), jobs=jobs)
        assert undo == plan_undo(Run.open(root), jobs=1)
        apply(Run.open(root), undo, jobs=jobs)
        assert differs(snapshot(root), before, times=True) is None
        ends.append(after)
    assert differs(ends[0], ends[1], times=False) is None


def test_the_error_of_the_first_is_raised_and_no_answer_is_out_of_place() -> None:
    def half(number: int) -> int:
        if number % 7 == 5:
            raise ValueError(number)
        return number // 2

    with files_at_once(32):
        assert side_by_side(half, range(5)) == [0, 0, 1, 1, 2]
        with pytest.raises(ValueError, match=r"^5$"):
            side_by_side(half, range(100))


def test_a_networks_file_system_gets_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = MOUNTS.read_text().splitlines()
    for kind, wanted in (("nfs4", 32), ("fuse.juicefs", 32), ("lustre", 32), ("ext4", 8)):
        changed = (line.split(" - ") for line in lines)
        mounts = tmp_path / "mounts"
        mounts.write_text("".join(f"{a} - {kind} {b.split(' ', 1)[1]}\n" for a, b in changed))
        monkeypatch.setattr("ckptsurgeon.disk.mount.MOUNTS", mounts)
        assert threads(tmp_path) == wanted, kind
    assert threads(tmp_path / "none") == 8
