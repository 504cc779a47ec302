"""Ranks share the jobs of a surgery: the same bytes as alone, whoever of them dies, and when."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.disk import calls
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.apply import help_with
from ckptsurgeon.transaction import job_list, ranks, staging
from ckptsurgeon.transaction.ranks import Ranks
from tests.conftest import Trained
from tests.support.snapshot import Snapshot, differs, snapshot

AVERAGE = {"average": {"last": 2}, "tensorboard": {"note": False}}
KILLED = -signal.SIGKILL
MOST = 4
"""Ranks."""


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Jobs so small that a surgery on a tiny run has many, and little patience."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("BATCH", 1 << 15), ("STRETCH", 1 << 12), ("LONG", 1 << 12)):
            patch.setattr(job_list, name, size)
        few = {"LOST_S": 1.0, "SIGN_S": 1.0, "SILENT_S": 5.0, "PAUSE_S": 0.01}
        for name, seconds in few.items():
            patch.setattr(ranks, name, seconds)
        yield


def operate(root: Path, mine: Ranks | None, *, resume: bool = False) -> None:
    helping = mine is not None and not mine.last
    run = replace(Run.open(root), resuming=resume, helping=helping)
    made = plan(run, from_data(AVERAGE))
    if mine is None or mine.last:
        surgery.apply(run, made, workers=mine)
    else:
        help_with(run, made, mine)


def begun(
    root: Path, mine: Ranks, at: int | None = None, *, resume: bool = False,
    by: int = signal.SIGKILL,
) -> int:  # fmt: skip
    """The process of a rank. It sends itself a signal right before that of its calls that would
    change the disk."""
    child = os.fork()
    if child == 0:
        made = count()

        def hook(*_: object) -> None:
            if next(made) == at:
                os.kill(os.getpid(), by)

        calls.hook = hook
        code = 99
        try:
            operate(root, mine, resume=resume)
            code = 0
        except SurgeryError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return child


def ended(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def launched(
    root: Path,
    of: int,
    start: str,
    deaths: Mapping[int, int] | None = None,
    *,
    resume: bool = False,
) -> list[int]:
    """The exit codes of all ranks."""
    each = [Ranks(rank, of, start) for rank in range(of)]
    dies = deaths or {}
    return ended([begun(root, mine, dies.get(mine.rank), resume=resume) for mine in each])


@pytest.fixture
def root(trained: Trained) -> Path:
    return trained(zero=1, dtype="bf16")


def alone(root: Path) -> Snapshot:
    """What a surgery of one process makes of a copy in its place."""
    with aside(root):
        operate(root, None)
        return snapshot(root, own=True)


@contextmanager
def aside(root: Path) -> Iterator[None]:
    """Inside, a copy is in its place."""
    kept = root.rename(root.with_name("aside"))
    shutil.copytree(kept, root)
    try:
        yield
    finally:
        shutil.rmtree(root)
        kept.rename(root)


def is_as(root: Path, wanted: Snapshot, *, times: bool) -> bool:
    return differs(snapshot(root, own=True), wanted, times=times) is None


@pytest.fixture
def around(root: Path) -> tuple[Snapshot, Snapshot]:
    """The run before the surgery, and after it."""
    return snapshot(root), alone(root)


@given(data=st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.long
def test_whoever_dies_the_run_is_before_or_after_and_goes_on(
    root: Path, around: tuple[Snapshot, Snapshot], data: Any
) -> None:
    """A dead helper costs its jobs. A dead last rank leaves what `recover` discards, or finishes,
    or what as many ranks as one likes go on with."""
    before, wanted = around
    of = data.draw(st.integers(1, MOST), "ranks")
    deaths = data.draw(st.dictionaries(st.integers(0, of - 1), st.integers(0, 300)), "deaths")
    with aside(root):
        codes = launched(root, of, "1-0-0", deaths)
        last = codes.pop()
        assert last in (0, KILLED)
        for rank, code in enumerate(codes):
            fine = {0, KILLED} if rank in deaths else {0}
            assert code in (fine if last == 0 else {*fine, 1}), (rank, codes)
        if last != 0:
            run = Run.open(root)
            assert run.under_way() is None
            committed = run.committed()
            if committed is False and data.draw(st.booleans(), "resume"):
                others = data.draw(st.integers(1, MOST), "then ranks")
                assert launched(root, others, "2-0-0", resume=True) == [0] * others
            elif committed is not None:
                assert surgery.recover(run).outcome == ("finished" if committed else "discarded")
            else:  # it died over its lock, which the next surgery takes over
                (root / ".ckptsurgeon/lock").unlink(missing_ok=True)
            if not (root / ".ckptsurgeon/receipts").exists():
                surgery.recover(run)
                assert is_as(root, before, times=True)
                return
        assert is_as(root, wanted, times=False)
        surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
        assert differs(snapshot(root), before, times=True) is None


def test_each_rank_does_its_share_and_says_what_it_did(
    root: Path, around: tuple[Snapshot, Snapshot]
) -> None:
    seen: list[tuple[str, int, float, int]] = []
    helpers = [begun(root, Ranks(rank, 3, "1-0-0")) for rank in range(2)]
    operate(root, Ranks(2, 3, "1-0-0", lambda *done: seen.append(done)))
    assert ended(helpers) == [0, 0]
    assert is_as(root, around[1], times=False)
    half = len(seen) // 2
    assert half > 10
    for phase in (seen[:half], seen[half:]):
        did = [rank for _, rank, _, _ in phase]
        assert did == [number % 3 for number in range(half)]


def test_more_ranks_than_jobs_is_no_matter(
    root: Path, around: tuple[Snapshot, Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_list, "BATCH", 1 << 40)
    assert launched(root, 3, "1-0-0") == [0, 0, 0]
    assert is_as(root, around[1], times=False)


@pytest.mark.parametrize("calls_before", [3, 9])
@pytest.mark.long
def test_a_rank_that_hangs_costs_its_jobs_and_spoils_nothing_once_it_is_back(
    root: Path, around: tuple[Snapshot, Snapshot], calls_before: int
) -> None:
    """It stops itself right before one of its calls, and makes that one when all is over: a write
    of bytes that are there."""
    child = begun(root, Ranks(0, 2, "1-0-0"), calls_before, by=signal.SIGSTOP)
    operate(root, Ranks(1, 2, "1-0-0"))
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    assert is_as(root, around[1], times=False)
    time.sleep(job_list.STALE)
    os.kill(child, signal.SIGCONT)
    assert ended([child]) == [0]
    assert is_as(root, around[1], times=False)
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert differs(snapshot(root), around[0], times=True) is None


@pytest.mark.parametrize("what", ["list", "version"])
@pytest.mark.long
def test_a_rank_with_another_list_or_version_computes_nothing(
    root: Path, around: tuple[Snapshot, Snapshot], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with monkeypatch.context() as patch:
        if what == "list":
            patch.setattr(job_list, "STRETCH", 1 << 11)
        else:
            patch.setattr(ranks, "VERSION", "0.9")
        helper = begun(root, Ranks(0, 2, "1-0-0"))
    seen: list[int] = []
    operate(root, Ranks(1, 2, "1-0-0", lambda host, rank, *_: seen.append(rank)))
    assert ended([helper]) == [1]
    assert {*seen} == {1} and is_as(root, around[1], times=False)


def test_ranks_of_another_launch_are_not_waited_for(
    root: Path, around: tuple[Snapshot, Snapshot]
) -> None:
    """A helper that is left of an earlier launch takes no part in this one."""
    old = begun(root, Ranks(0, 2, "1-0-0"))
    assert launched(root, 2, "2-0-0") == [0, 0]
    assert is_as(root, around[1], times=False)
    assert ended([old]) == [1]


def test_a_helper_may_begin_when_its_share_is_done(
    root: Path, around: tuple[Snapshot, Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plans beside the lock and the journal of the last rank, which waits for its signature:
    after the commit it would plan something else."""
    monkeypatch.setattr(ranks, "LOST_S", 0.1)
    monkeypatch.setattr(ranks, "SIGN_S", 600.0)
    run = Run.open(root)
    count = len(staging.jobs(root, plan(run, from_data(AVERAGE))))
    last = begun(root, Ranks(1, 2, "1-0-0"))
    record = root / ".ckptsurgeon/staging/0001.jobs"
    end = time.monotonic() + 600
    while not record.exists() or record.read_bytes().count(b'"phase": 1, "result"') < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.3)
    assert launched_one(root) == 0
    assert ended([last]) == [0]
    assert is_as(root, around[1], times=False)


def test_a_helper_that_comes_when_all_is_done_ends_at_once(
    root: Path, around: tuple[Snapshot, Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would plan one more surgery, and wait for a last rank that has ended."""
    assert ended([begun(root, Ranks(1, 2, "1-0-0"))]) == [0]
    monkeypatch.setattr(ranks, "SILENT_S", 600.0)
    assert launched_one(root) == 0
    assert is_as(root, around[1], times=False)


def launched_one(root: Path) -> int:
    return ended([begun(root, Ranks(0, 2, "1-0-0"))])[0]


def test_a_surgery_that_waits_is_no_helpers_matter(root: Path) -> None:
    """Without --resume the last rank refuses what an earlier launch has left."""
    assert launched(root, 1, "1-0-0", {0: 40}) == [KILLED]
    assert Run.open(root).committed() is False
    with pytest.raises(InterruptedSurgery):
        operate(root, Ranks(1, 2, "2-0-0"))
    assert launched_one(root) == 1, "it has heard nothing"
