"""--on SCHEDULER: the workers of a Dask cluster read, or compute, what a long pass does.
--ranks-from-env: the tasks of an srun compute it."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ckptsurgeon.cli.in_slurm import SLURM, join, ranks, script
from ckptsurgeon.cli.tally import Done, Measured, Tally
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.hints import Hint, again, shell
from ckptsurgeon.report.terminal import unchecked
from ckptsurgeon.version import VERSION

if TYPE_CHECKING:
    from ckptsurgeon.transaction.ranks import Ranks
    from ckptsurgeon.workers import Workers

T = TypeVar("T")
ANSWER_S = 20
"""Seconds in which the scheduler and a first worker must answer."""
LOST_S = 30
"""Seconds without any worker after which a pass fails."""
ADDRESS = re.compile(r"([a-z]+://)?[^/\s]+:\d+")
RETRIES = 3
"""How often a job is done anew whose worker is lost, as in Dask's own `allowed-failures`."""


def _joined(ctx: typer.Context, on: str | None) -> str | None:
    """In a task of an srun whose command has --on slurm: the scheduler's file, for the surgeon."""
    if on != SLURM or ctx.resilient_parsing:
        return on
    file, end = join()
    ctx.call_on_close(end)
    return str(file)


def _scripted(ctx: typer.Context, options: list[str] | None) -> list[str] | None:
    if options and not ctx.resilient_parsing:
        print(script(ctx, options))
        raise typer.Exit
    return options


@dataclass(frozen=True)
class Cluster:
    """What a command accepts whose long pass may be done by others."""

    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="SCHEDULER",
            callback=_joined,
            help="Have a Dask cluster do it: its scheduler's address or file, or `slurm` in an "
            "srun (docs/cluster.md).",
        ),
    ] = None
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            "--sbatch",
            metavar="KEY=VALUE",
            is_eager=True,
            callback=_scripted,
            help="With --on slurm: only print a script, with this line for sbatch.",
        ),
    ] = None

    @contextmanager
    def workers(
        self, jobs: int | None, folders: Sequence[Path], *, quiet: bool = False
    ) -> Iterator[Workers]:
        """`jobs` threads of this process, or as many as the file system bears, or the workers of
        the cluster. Raises UsageError where none answers, where one has another version of this
        package or sees other `folders`; a pass raises SurgeryError where workers are lost again and
        again. What they did is said on stderr, unless `quiet`."""
        from ckptsurgeon.disk import mount

        if self.on is None:
            yield jobs or mount.threads(folders[0])
            return
        with _cluster(self.on, folders) as cluster:
            yield cluster
            if not quiet and cluster.tally.jobs:
                print(f"  {cluster.tally}", file=unchecked(sys.stderr))


@dataclass(frozen=True)
class Computed(Cluster):
    """What a command accepts that computes tensors."""

    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Note what is computed; go on from there where it was killed."
        ),
    ] = False

    from_env: Annotated[
        bool,
        typer.Option(
            "--ranks-from-env",
            help="Share the work with the other tasks of an srun; the last one commits.",
        ),
    ] = False

    def helper(self) -> Ranks | None:
        """This process, where it only helps the last task of its srun. Raises UsageError outside
        of an srun."""
        if not self.from_env:
            return None
        if self.on is not None:
            raise UsageError(
                "--on and --ranks-from-env exclude each other",
                next=again(without=["--ranks-from-env"]),
            )
        mine = ranks()
        return None if mine.last else mine

    @contextmanager
    def writers(
        self, jobs: int | None, folders: Sequence[Path], *, quiet: bool = False
    ) -> Iterator[Executor | None]:
        """The same for what leaves records; None where it is the threads of this process, which
        leave none."""
        if self.from_env:
            tally, began = Tally(), time.monotonic()
            yield ranks(
                lambda host, rank, took, size: tally.add(Done(host, str(rank), took, size, None))
            )
            tally.seconds = time.monotonic() - began
            if not quiet and tally.jobs:
                print(f"  {tally}", file=unchecked(sys.stderr))
            return
        if self.on is None and not self.resume:
            yield None
            return
        with self.workers(jobs, folders, quiet=quiet) as who:
            if isinstance(who, Executor):
                yield who
            else:
                with ThreadPoolExecutor(who) as pool:
                    yield pool


@contextmanager
def _cluster(on: str, folders: Sequence[Path]) -> Iterator[_Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(
            "--on needs Dask, which is not installed",
            next=shell(["pip", "install", "ckptsurgeon[cluster]"]),
        ) from None
    given = {"scheduler_file": on} if Path(on).is_file() else {"address": on}
    if "address" in given and not ADDRESS.fullmatch(on):
        raise UsageError(f"--on {on} is no file, and no address", next=_without(on))
    try:
        client = Client(**given, timeout=ANSWER_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"no Dask scheduler answers at {on}: {error}", next=_without(on)) from None
    with client:
        _refuse_unlike(client, on, folders)
        ended, lost = threading.Event(), threading.Event()
        watch = threading.Thread(target=_watch, args=(client, ended, lost), daemon=True)
        watch.start()
        try:
            yield _Executor(client, on, lost)
        finally:
            ended.set()
            watch.join()


class _Executor(Executor):
    """The workers of a Dask cluster. A job whose worker is lost is done again by another one."""

    def __init__(self, client: Any, on: str, lost: threading.Event) -> None:
        # Not pure: Dask would take what a job gave before for what it gives now.
        self._executor = client.get_executor(retries=RETRIES, pure=False)
        self._on, self._lost = on, lost
        self.tally = Tally()

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """What the function gives for each job, in their order. Raises SurgeryError where the
        workers are lost."""
        from distributed import KilledWorker
        from distributed.comm import CommClosedError

        began = time.monotonic()
        try:
            for done in self._executor.map(Measured(fn, VERSION), *iterables, timeout=timeout):
                self.tally.add(done)
                yield done.result
        except ImportError as error:  # a worker that came later, of a version without these modules
            raise SurgeryError(
                f"a worker of {self._on} has another version of ckptsurgeon than {VERSION}, or "
                f"lacks what it needs: {error}",
                next=shell(["pip", "install", f"ckptsurgeon=={VERSION}"], why="on its host"),
            ) from None
        except Exception as error:
            if not self._lost.is_set() and not isinstance(error, (KilledWorker, CommClosedError)):
                raise
            raise SurgeryError(
                f"the workers of {self._on} are lost", next=(again(), _without(self._on))
            ) from None
        finally:
            self.tally.seconds += time.monotonic() - began


def _watch(client: Any, ended: threading.Event, lost: threading.Event) -> None:
    """Give up where no worker is left for LOST_S: Dask waits for others for ever."""
    since = time.monotonic()
    while not ended.wait(1):
        if client.scheduler_info()["workers"]:
            since = time.monotonic()
        elif time.monotonic() - since > LOST_S:
            lost.set()
            client.close(timeout=1)
            return


def _without(on: str) -> Hint:
    return again(without=["--on", on], why="with threads of this process")


def _refuse_unlike(client: Any, on: str, folders: Sequence[Path]) -> None:
    try:
        client.wait_for_workers(1, timeout=ANSWER_S)
    except TimeoutError:
        raise UsageError(f"the Dask scheduler at {on} has no worker", next=_without(on)) from None
    mine = [_seen(folder) for folder in folders]
    found = client.run(_told, [str(folder.resolve()) for folder in folders], on_error="return")
    for worker, told in sorted(found.items()):
        if not isinstance(told, tuple) or told[0] != VERSION:
            other = f"has {told[0]}" if isinstance(told, tuple) else f"can't tell: {told}"
            raise UsageError(
                f"the worker {worker} {other}; ckptsurgeon is {VERSION} here",
                next=shell(["pip", "install", f"ckptsurgeon=={VERSION}"], why="on its host"),
            )
        for folder, here, there in zip(folders, mine, told[1], strict=True):
            if here != there:
                raise UsageError(
                    f"the worker {worker} does not see {folder} as it is here", next=_without(on)
                )


def _told(folders: Sequence[str]) -> tuple[str, list[list[str]]]:
    """Asked on each worker."""
    return VERSION, [_seen(Path(folder)) for folder in folders]


def _seen(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return [type(error).__name__]
