"""Bytes that workers compute: the same as alone, gone on with after a kill, by no worker of old."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.disk import calls
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.plans.edits import Computed
from ckptsurgeon.plans.sources import Source
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction import computing, job_list
from ckptsurgeon.transaction.computing import Place
from tests.conftest import Trained
from tests.support.snapshot import differs, snapshot

AVERAGE = {"average": {"last": 2}, "tensorboard": {"note": False}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs so small that a surgery on a tiny run has many."""
    monkeypatch.setattr(job_list, "BATCH", 1 << 15)
    monkeypatch.setattr(job_list, "STRETCH", 1 << 12)
    monkeypatch.setattr(job_list, "LONG", 1 << 12)


@pytest.fixture
def root(trained: Trained) -> Path:
    return trained(zero=1, dtype="bf16")


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def operate(root: Path, workers: Executor | None, *, resume: bool = False) -> None:
    run = replace(Run.open(root), resuming=resume)
    surgery.apply(run, plan(run, from_data(AVERAGE)), workers=workers)


def copied(root: Path) -> Path:
    return Path(shutil.copytree(root, root.with_name("other")))


def alone(root: Path) -> Any:
    """What a surgery without workers makes of a copy."""
    other = copied(root)
    operate(other, None)
    found = snapshot(other, own=True)
    shutil.rmtree(other)
    return found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[job_list.Job]:
    """The jobs that are computed from here on."""
    found: list[job_list.Job] = []
    real = job_list.do

    def do(job: job_list.Job) -> str:
        if not (job.known and job_list.check(job)):
            found.append(job)
        return real(job)

    monkeypatch.setattr(job_list, "do", do)
    return found


def killed(root: Path, dies: Callable[[str, str, int], bool]) -> int:
    """Jobs that were noted by a surgery that ends in the first call that `dies`, by its operation,
    its path and the number of calls like it."""
    child = os.fork()
    if child == 0:
        seen: dict[tuple[str, str], int] = {}

        def hook(operation: str, path: str, _: object) -> None:
            number = seen[operation, path] = seen.get((operation, path), 0) + 1
            if dies(operation, path, number):
                os._exit(9)

        calls.hook = hook
        try:
            with ThreadPoolExecutor(1) as pool:
                operate(root, pool)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    record = root / ".ckptsurgeon/staging/0001.jobs"
    return record.read_bytes().count(b'"crcs"') if record.exists() else 0


def noted(count: int) -> Callable[[str, str, int], bool]:
    """Dies when so many jobs are noted."""
    return lambda operation, path, number: (
        operation == "write" and path.endswith(".jobs") and number == count + 2
    )


def test_threads_and_processes_make_what_one_process_makes(
    root: Path, threads: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, before, other = alone(root), snapshot(root), copied(root)
    jobs = counted(monkeypatch)
    operate(root, threads)
    assert differs(snapshot(root, own=True), wanted, times=False) is None
    assert len(jobs) > 10
    monkeypatch.undo()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        operate(other, pool)
    assert differs(snapshot(other, own=True), wanted, times=False) is None
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert differs(snapshot(root), before, times=True) is None


@pytest.mark.parametrize("done", [0, 1, 7])
@pytest.mark.long
def test_a_killed_surgery_is_gone_on_with_or_discarded(
    root: Path, threads: Executor, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    wanted, before, other = alone(root), snapshot(root), copied(root)
    assert killed(root, noted(done)) == done
    assert killed(other, noted(done)) == done
    with pytest.raises(InterruptedSurgery, match="was interrupted") as refused:
        operate(other, None)
    assert "--resume" in refused.value.next[0] and refused.value.next[1].startswith("ckptsurgeon")
    surgery.recover(Run.open(other))
    assert differs(snapshot(other, own=True), before, times=True) is None
    jobs = counted(monkeypatch)
    operate(root, threads, resume=True)
    assert differs(snapshot(root, own=True), wanted, times=False) is None
    again = len(jobs)
    operate(other, threads)
    assert len(jobs) - again == again + done, "those that were noted were not done again"


@pytest.mark.parametrize(
    "every", [pytest.param(37, id="thin"), pytest.param(3, id="dense", marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_a_kill_at_any_call_is_gone_on_with_or_discarded(
    root: Path, threads: Executor, every: int
) -> None:
    """Also a second kill, of the attempt that goes on."""
    wanted, before, other = alone(root), snapshot(root), copied(root)
    shutil.rmtree(root)
    outcomes = set()
    for number in range(1, 10_000, every):
        shutil.copytree(other, root)
        code = at_call(root, number)
        if code == 0:
            break
        finished = (root / ".ckptsurgeon/receipts/0001/receipt.json").exists()
        again = 9 if finished else at_call(root, number * 2, resume=True)
        if again != 0:
            if Run.open(root).committed() is False and number % 2:
                operate(root, threads, resume=True)
            else:
                surgery.recover(Run.open(root))
        found = snapshot(root, own=True)
        at = "before" if differs(found, before, times=True) is None else "after"
        assert at == "before" or differs(found, wanted, times=False) is None, number
        outcomes.add((again, at))
        shutil.rmtree(root)
    assert number > 200
    assert {(9, "after"), (9, "before")} <= outcomes, outcomes


def at_call(root: Path, number: int, *, resume: bool = False) -> int:
    """How a surgery ends that is killed at one of its calls, whichever thread makes it."""
    child = os.fork()
    if child == 0:
        made = count(1)

        def hook(*_: object) -> None:
            if next(made) == number:
                os._exit(9)

        calls.hook = hook
        code = 1
        try:
            with ThreadPoolExecutor(2) as pool:
                operate(root, pool, resume=resume)
            code = 0
        except InterruptedSurgery:
            code = 5
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("where", ["staged", "record"])
@pytest.mark.long
def test_what_does_not_read_back_is_done_again(
    root: Path, threads: Executor, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    wanted = alone(root)
    assert killed(root, noted(5)) == 5
    staging = root / ".ckptsurgeon/staging"
    if where == "record":
        data = (staging / "0001.jobs").read_bytes()
        (staging / "0001.jobs").write_bytes(data.replace(b'"crcs": [', b'"crcs": [1', 2))
    else:
        for path in (staging / "0001").rglob("*.pt"):
            whole = bytearray(path.read_bytes())
            whole[len(whole) // 3] ^= 1
            path.write_bytes(whole)
    operate(root, threads, resume=True)
    assert differs(snapshot(root, own=True), wanted, times=False) is None


def test_of_changed_sources_nothing_is_taken_up(
    root: Path, threads: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert killed(root, noted(5)) == 5
    for path in root.glob("global_step6/*"):
        os.utime(path)
    wanted = alone_without_staging(root)
    jobs = counted(monkeypatch)
    operate(root, threads, resume=True)
    assert differs(snapshot(root, own=True), wanted, times=False) is None
    assert len(jobs) > 10
    assert not any(job.known for job in jobs)


def alone_without_staging(root: Path) -> Any:
    other = copied(root)
    surgery.recover(Run.open(other))
    operate(other, None)
    return snapshot(other, own=True)


def test_another_surgery_is_not_gone_on_with(root: Path, threads: Executor) -> None:
    assert killed(root, noted(2)) == 2
    run = replace(Run.open(root), resuming=True)
    other = plan(run, from_data({"average": {"last": 3}}))
    with pytest.raises(InterruptedSurgery, match="was interrupted: average steps 6, 8"):
        surgery.apply(run, other, workers=threads)
    operate(root, threads, resume=True)


def test_a_surgery_past_its_commit_point_is_finished_by_recover_alone(
    root: Path, threads: Executor
) -> None:
    killed(root, lambda operation, path, _: operation == "rename" and path.endswith(".pt"))
    with pytest.raises(InterruptedSurgery, match="was interrupted"):
        operate(root, threads, resume=True)
    assert surgery.recover(Run.open(root)).outcome == "finished"


# --- one job -------------------------------------------------------------------------------------


def one(folder: Path) -> list[job_list.Job]:
    """The list of one job that copies 100 bytes into a file that is there, begun."""
    (folder / "raw").write_bytes(bytes(range(100)))
    (folder / "new").write_bytes(bytes(100))
    piece = Computed("copy", "", 100, ((Source("raw", 0, 100, ""),),))
    jobs = job_list.of(folder, folder / "jobs", [Place(folder / "new", 0, piece)])
    job_list.begin(jobs)
    return jobs


def test_a_worker_of_another_list_writes_nothing(tmp_path: Path) -> None:
    (old,) = one(tmp_path)
    (tmp_path / "jobs").unlink()
    os.utime(tmp_path / "raw", ns=(1, 1))
    (new,) = one(tmp_path)
    with pytest.raises(SurgeryError, match="another attempt has begun"):
        job_list.do(old)
    assert (tmp_path / "new").read_bytes() == bytes(100)
    job_list.do(new)
    assert (tmp_path / "new").read_bytes() == bytes(range(100))


def test_a_worker_that_was_away_looks_again_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two blocks of one job the surgery was taken back, and begun anew."""
    monkeypatch.setattr(computing, "BLOCK", 10)
    monkeypatch.setattr(job_list, "STALE", 0.0)
    (job,) = one(tmp_path)

    def hook(operation: str, path: str, _: object) -> None:
        if operation == "write" and path.endswith("new"):
            (tmp_path / "jobs").unlink(missing_ok=True)

    monkeypatch.setattr(calls, "hook", hook)
    with pytest.raises(SurgeryError, match="another attempt has begun"):
        job_list.do(job)
    assert (tmp_path / "new").read_bytes() == bytes(range(10)) + bytes(90)


def test_a_source_that_another_host_sees_changed_is_refused(tmp_path: Path) -> None:
    (job,) = one(tmp_path)
    os.utime(tmp_path / "raw", ns=(1, 1))
    with pytest.raises(SurgeryError, match=r"is not on .* what it was"):
        job_list.do(job)
    assert (tmp_path / "new").read_bytes() == bytes(100)


def test_a_worker_whose_disk_is_another_is_found_out(tmp_path: Path, threads: Executor) -> None:
    """It has the same names, and what it writes is not seen here."""
    (job,) = one(tmp_path)
    there = Path(shutil.copytree(tmp_path, tmp_path / "there"))

    class Elsewhere(ThreadPoolExecutor):
        def map(self, fn: Any, *jobs: Any, **how: Any) -> Any:
            moved = [
                each._replace(
                    root=there, record=there / "jobs",
                    parts=tuple(
                        part._replace(places=tuple(
                            place._replace(path=there / "new") for place in part.places
                        )) for part in each.parts
                    ),
                ) for each in jobs[0]
            ]  # fmt: skip
            return super().map(fn, moved, **how)

    with Elsewhere(1) as pool, pytest.raises(SurgeryError, match="it sees another disk"):
        job_list.done([job], pool)
