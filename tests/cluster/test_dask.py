"""Workers of a Dask cluster read a run: the same words as alone, whoever of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import Trained
from tests.support.dask_workers import Dask, path, surgeon
from tests.support.launch import REPO

pytestmark = pytest.mark.cluster
SLOW = REPO / "tests/cluster/slow_jobs.py"


WORDS = (
    ("verify", "--level", 3),
    ("verify", "--level", 4),
    ("verify", "8", "--after", 6),
    ("doctor", "--vitals"),
    ("diff", "6", "8", "--tensors"),
)


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_workers_say_what_one_process_says(
    dask: Dask, trained: Trained, count: int
) -> None:
    root = trained(ranks=2)
    for _ in range(count):
        dask.add()
    dask.wait()
    for words in WORDS:
        alone = surgeon(*words, "--json", "-C", root)
        assert surgeon(*words, "--json", "-C", root, "--on", dask.file) == alone
        assert json.loads(alone[1])["schema"] == 1


def test_workers_that_die_cost_the_jobs_that_they_had(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    root = trained(ranks=2)
    words = ("verify", "--level", 4, "--json", "-C", root)
    alone = surgeon(*words)
    for _ in range(3):
        jobs = tmp_path / f"jobs-{len(dask.workers)}"
        jobs.mkdir()
        for _ in range(2):
            dask.add("--preload", SLOW, JOBS=str(jobs))
        dask.wait()
        victims: list[int] = []

        def kill() -> None:
            for _ in range(12000):
                if found := [*jobs.iterdir()]:  # noqa: B023
                    victims.append(int(found[0].name))  # noqa: B023
                    os.kill(victims[0], signal.SIGKILL)  # noqa: B023
                    return
                time.sleep(0.05)

        killer = threading.Thread(target=kill)
        killer.start()
        code, said, error = surgeon(*words, "--on", dask.file)
        killer.join()
        assert victims and (code, said) == alone[:2], error
        assert len([*jobs.iterdir()]) == 2, "the other one did its jobs, too"
        for worker in dask.workers:
            worker.kill()
            worker.wait()


def test_without_any_worker_left_it_fails_and_says_so(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    root = trained()
    dask.add("--preload", SLOW, JOBS=str(tmp_path))
    dask.wait()

    def kill() -> None:
        while not [*tmp_path.glob("[0-9]*")]:
            time.sleep(0.05)
        dask.workers[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    code, _, error = surgeon("verify", "--level", 4, "-C", root, "--on", dask.file)
    killer.join()
    assert code == 1 and f"error: the workers of {dask.file} are lost" in error, error
    (alone,) = [line for line in error.splitlines() if "with threads of this" in line]
    assert "verify --level 4" in alone and str(dask.file) not in alone


def test_a_worker_of_another_version_is_refused(
    dask: Dask, trained: Trained, tmp_path: Path
) -> None:
    """As none at all is."""
    root = trained()
    code, _, error = surgeon("verify", "--level", 3, "-C", root, "--on", dask.file)
    assert code == 2 and "has no worker" in error
    older = tmp_path / "ckptsurgeon"
    subprocess.run(["cp", "-r", REPO / "ckptsurgeon", older], check=True)
    (older / "version.py").write_text('VERSION = "0.9"\n')
    dask.add(PYTHONPATH=os.pathsep.join([str(tmp_path), path()]))
    dask.wait()
    code, _, error = surgeon("verify", "--level", 3, "-C", root, "--on", dask.file)
    assert code == 2 and "has 0.9; ckptsurgeon is" in error, error
    assert "next: pip install ckptsurgeon==" in error


def test_a_scheduler_that_does_not_answer_is_refused(trained: Trained) -> None:
    pytest.importorskip("distributed")
    root = trained()
    code, _, error = surgeon("verify", "--level", 3, "-C", root, "--on", "tcp://127.0.0.1:1")
    assert code == 2 and "no Dask scheduler answers at tcp://127.0.0.1:1" in error
    code, _, error = surgeon("verify", "--level", 3, "-C", root, "--on", "dask.json")
    assert code == 2 and "--on dask.json is no file, and no address" in error
    code, _, error = surgeon("doctor", "-C", root, "--on", "tcp://127.0.0.1:1")
    assert code == 2 and "--on belongs to --vitals" in error
