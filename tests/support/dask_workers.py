"""A Dask scheduler and its workers, as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.launch import ON_CPU, REPO

SLOW = REPO / "tests/cluster/slow_writes.py"


class Dask:
    """A scheduler, whose file is `file`, and its `workers`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.file = folder / "scheduler.json"
        self._folder = folder
        self._started = [self._start("scheduler", "--port", 0, "--no-dashboard")]
        for _ in range(6000):
            if self.file.exists():
                break
            time.sleep(0.05)
        self.workers: list[subprocess.Popen[str]] = []

    def add(self, *more: object, limit: int = 0, **environment: str) -> None:
        """One worker more; with `limit`, one that can make no file larger."""
        words = ["--nthreads", 1, "--no-nanny", "--no-dashboard", "--local-directory", self._folder]
        worker = self._start("worker", *words, *more, limit=limit, **environment)
        self.workers.append(worker)
        self._started.append(worker)

    def wait(self) -> None:
        """Until each of its workers that lives takes jobs."""
        from distributed import Client

        with Client(scheduler_file=str(self.file), set_as_default=False) as client:
            alive = sum(worker.poll() is None for worker in self.workers)
            client.wait_for_workers(alive, timeout=600)

    def _start(self, *words: object, limit: int = 0, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "distributed.cli.dask_" + str(words[0]), *words[1:]]
        command += ["--scheduler-file", self.file]
        with (self._folder / "said").open("a") as said:
            return subprocess.Popen(
                [*_limited(limit), *map(str, command)], cwd=self._folder, stdout=said,
                stderr=said, text=True,
                env={**os.environ, **ON_CPU, "PYTHONPATH": path(), **environment},
            )  # fmt: skip

    def end(self) -> None:
        """All of them are gone."""
        for process in reversed(self._started):
            process.kill()
            process.wait()


class Slow:
    """Workers that take their time, and say which of them work."""

    def __init__(self, dask: Dask, folder: Path, seconds: float) -> None:
        self.dask, self.folder, self.seconds = dask, folder, seconds
        folder.mkdir()

    def add(self, *more: object, **environment: str) -> None:
        given = {"JOBS": str(self.folder), "SECONDS": str(self.seconds), **environment}
        self.dask.add("--preload", SLOW, *more, **given)

    def busy(self) -> list[int]:
        """The processes that have begun a job."""
        return [int(name.name) for name in self.folder.iterdir()]

    def wait(self) -> None:
        """Until one is at work."""
        self._until(self.busy)

    def wait_for(self, worker: int) -> None:
        """Until this one is."""
        self._until(lambda: worker in self.busy())

    def _until(self, found: Callable[[], object]) -> None:
        for _ in range(12000):
            if found():
                return
            time.sleep(0.05)
        raise AssertionError("no worker is at work")


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _limited(size: int) -> list[str]:
    return ["prlimit", f"--fsize={size}"] if size else []


def path() -> str:
    """PYTHONPATH for all of them."""
    return os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])


def surgeon(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptsurgeon", *map(str, words)],
        cwd=REPO, env={**os.environ, "PYTHONPATH": path()}, capture_output=True, text=True,
        check=False, timeout=900,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr
