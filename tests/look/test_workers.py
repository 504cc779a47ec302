"""A pass that processes of an executor read says what threads say, in the same words."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import pytest

from ckptsurgeon import Run, look, report
from ckptsurgeon.errors import DamagedFile, SurgeryError, UsageError
from ckptsurgeon.hints import command
from ckptsurgeon.look.diff.diff import diff
from ckptsurgeon.look.diff.sides import Side
from ckptsurgeon.look.doctor import judged
from ckptsurgeon.look.vitals.vitals import examine
from ckptsurgeon.workers import Workers
from tests.conftest import Trained

Pass = Callable[[Run, Workers], Any]


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        yield pool


def verified(level: int, against: int | None = None) -> Pass:
    def of(run: Run, workers: Workers) -> Any:
        found = look.verify(run, level=level, against=against, jobs=workers)
        return report.verification_json(found, None)

    return of


def compared(run: Run, workers: Workers) -> Any:
    sides = Side.parse("6", run), Side.parse("8", run)
    return report.diff_json(diff(*sides, tensors=True, jobs=workers))


def examined(run: Run, workers: Workers) -> Any:
    return report.diagnoses_json(run, [], judged(run), examine(run, jobs=workers))


PASSES: dict[str, Pass] = {
    "level 1": verified(1),
    "level 3": verified(3),
    "level 4": verified(4),
    "after": verified(4, 6),
    "diff --tensors": compared,
    "vitals": examined,
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(("ranks", "zero"), [(1, 1), (2, 3)])
def test_processes_say_what_threads_say(
    trained: Trained, processes: Executor, name: str, ranks: int, zero: int
) -> None:
    run = Run.open(trained(ranks=ranks, zero=zero))
    theirs, ours = (json.dumps(PASSES[name](run, workers)) for workers in (processes, 3))
    assert theirs == ours


@pytest.mark.parametrize("level", [1, 3, 4])
def test_processes_find_the_same_damage(trained: Trained, processes: Executor, level: int) -> None:
    root = trained(ranks=2)
    files = sorted((root / "global_step8").glob("*.pt"))
    os.truncate(files[0], files[0].stat().st_size // 2)
    with files[-1].open("r+b") as file:
        file.seek(files[-1].stat().st_size // 2)
        file.write(b"\xff" * 64)
    theirs, ours = (look.verify(Run.open(root), level=level, jobs=w) for w in (processes, 3))
    assert theirs.findings == ours.findings != ()


@pytest.mark.parametrize("kind", [SurgeryError, UsageError])
def test_an_error_of_a_worker_is_the_same_here(kind: type[SurgeryError]) -> None:
    error = kind("that", next=[command("verify", 8, why="this"), "by hand"], untouched="all")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == "that"
    assert (again.what, again.untouched, again.next) == (error.what, error.untouched, error.next)
    damaged = pickle.loads(pickle.dumps(DamagedFile("a file", 7, "it is cut")))
    assert (type(damaged), damaged.what) == (DamagedFile, "a file: byte 7: it is cut")
