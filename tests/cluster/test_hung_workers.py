"""A worker that hangs costs the jobs that it had: others do them, too."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.cli import dask_workers
from ckptsurgeon.cli.on import Computed
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction import job_list
from tests.conftest import Trained
from tests.support.dask_workers import Dask, Slow, meanwhile, surgeon
from tests.support.snapshot import Snapshot, differs, snapshot

pytestmark = pytest.mark.cluster
AVERAGE = {"average": {"steps": ["6", "8"]}, "tensorboard": {"note": False}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many jobs on a tiny run, and little patience."""
    monkeypatch.setattr(job_list, "BATCH", 1 << 15)
    monkeypatch.setattr(job_list, "STRETCH", 1 << 12)
    monkeypatch.setattr(job_list, "LONG", 1 << 12)
    monkeypatch.setattr(dask_workers, "HUNG_S", 3.0)
    monkeypatch.setattr(dask_workers, "FIRST_S", 6.0)


def operate(root: Path, dask: Dask | None) -> None:
    run = Run.open(root)
    made = plan(run, from_data(AVERAGE))
    if dask is None:
        surgery.apply(run, made)
        return
    dask.wait()
    with Computed(str(dask.file)).writers(1, [root]) as who:
        surgery.apply(run, made, workers=who)


def alone(root: Path) -> Snapshot:
    other = Path(shutil.copytree(root, root.with_name("other")))
    operate(other, None)
    found = snapshot(other, own=True)
    shutil.rmtree(other)
    return found


@pytest.mark.parametrize("when", ["before", "at work"])
def test_one_that_is_stopped_costs_its_jobs_and_spoils_nothing_once_it_is_back(
    dask: Dask, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    root = trained(zero=1, dtype="bf16")
    before, wanted = snapshot(root), alone(root)
    slow = Slow(dask, tmp_path / "jobs", 0.05)
    slow.add()
    slow.add()
    victim = dask.workers[0].pid

    def stop() -> None:
        slow.wait_for(victim)
        os.kill(victim, signal.SIGSTOP)

    if when == "before":
        dask.wait()
        os.kill(victim, signal.SIGSTOP)
        operate(root, dask)
    else:
        with meanwhile(stop):
            operate(root, dask)
    said = capsys.readouterr().err
    assert ("does not answer" in said) is (when == "before"), said
    assert differs(snapshot(root, own=True), wanted, times=False) is None
    os.kill(victim, signal.SIGCONT)
    code, _, error = surgeon("verify", "--level", 4, "-C", root, "--on", dask.file)
    assert code == 0, error
    assert differs(snapshot(root, own=True), wanted, times=False) is None
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert differs(snapshot(root), before, times=True) is None


def test_one_whose_job_never_ends_costs_it(
    dask: Dask, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process lives, and says so to the scheduler: it waits for a disk that does not answer."""
    root = trained(zero=1, dtype="bf16")
    wanted = alone(root)
    slow = Slow(dask, tmp_path / "jobs", 0.05)
    slow.add(SECONDS="100000")
    slow.add()
    slow.add()
    dask.wait()
    operate(root, dask)
    assert dask.workers[0].pid in slow.busy()
    said = capsys.readouterr().err
    assert "has ended no job for" in said and "others do what it has" in said, said
    assert differs(snapshot(root, own=True), wanted, times=False) is None


def test_one_that_is_slow_and_alone_is_waited_for(
    dask: Dask, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_list, "BATCH", 1 << 17)
    for name in ("HUNG_S", "FIRST_S", "LONGER"):
        monkeypatch.setattr(dask_workers, name, 0.1)
    monkeypatch.setattr(dask_workers, "LOOK_S", 0.1)
    root = trained(zero=1, dtype="bf16")
    wanted = alone(root)
    slow = Slow(dask, tmp_path / "jobs", 0.5)
    slow.add()
    operate(root, dask)
    assert differs(snapshot(root, own=True), wanted, times=False) is None
