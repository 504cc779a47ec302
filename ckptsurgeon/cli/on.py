"""--on SCHEDULER: the workers of a Dask cluster read, or compute, what a long pass does.
--ranks-from-env: the tasks of an srun do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon.cli.in_slurm import SLURM, join, ranks, script
from ckptsurgeon.errors import UsageError
from ckptsurgeon.hints import again
from ckptsurgeon.plans.frozen import frozen

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptsurgeon.cli.tally import Tally
    from ckptsurgeon.report.progress import Progress
    from ckptsurgeon.transaction.ranks import Ranks, Told
    from ckptsurgeon.workers import Workers


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


@frozen
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
    from_env: Annotated[
        bool,
        typer.Option(
            "--ranks-from-env",
            help="Share the work with the other tasks of an srun; the last one commits, or "
            "answers. --sbatch prints a script of it, too.",
        ),
    ] = False

    @property
    def shared(self) -> str:
        """The option by which others share the work; empty where none does."""
        return "--on" if self.on is not None else "--ranks-from-env" if self.from_env else ""

    def helper(self) -> Ranks | None:
        """This process, where it only helps the last task of its srun. Raises UsageError outside
        of an srun."""
        if not self.from_env:
            return None
        if self.on is not None:
            raise UsageError(
                "--on and --ranks-from-env exclude each other",
                next=(
                    again(without=["--ranks-from-env"], why="with Dask"),
                    again(without=["--on", self.on], why="without it"),
                ),
            )
        mine = ranks()
        return None if mine.last else mine

    @contextmanager
    def workers(
        self, jobs: int | None, folders: Sequence[Path], progress: Progress | None = None
    ) -> Iterator[Workers]:
        """Who reads: `jobs` threads of this process, or as many as the file system bears, or the
        workers of the cluster, or the tasks of an srun, of which all but the last one end here.
        Raises UsageError where none answers, where one has another version of this package or sees
        other `folders`; a pass raises SurgeryError where workers are lost again and again. What
        they do is part of the `progress`, and what they did its last line."""
        from ckptsurgeon.disk import mount

        if self.from_env:
            with self._readers(progress) as readers:
                yield readers
            return
        if self.on is None:
            yield jobs or mount.threads(folders[0])
            return
        with self._dask(self.on, folders, progress) as workers:
            yield workers

    @contextmanager
    def writers(
        self, jobs: int | None, folders: Sequence[Path], progress: Progress | None = None
    ) -> Iterator[Executor | None]:
        """Who writes what the last task, or this process, commits: the same for what leaves
        records; None where it is the threads of this process, which leave none."""
        if self.from_env:
            yield ranks(_told(progress))
        elif self.on is None:
            yield None
        else:
            with self._dask(self.on, folders, progress) as workers:
                yield workers

    @contextmanager
    def _readers(self, progress: Progress | None) -> Iterator[Executor]:
        from ckptsurgeon.cli.readers import Readers

        helper = self.helper()
        if helper is not None and progress is not None:
            progress.quiet = True
        with Readers(helper or ranks(), Path.cwd(), _told(progress)) as readers:
            yield readers
        if helper is not None:
            raise typer.Exit

    @contextmanager
    def _dask(
        self, on: str, folders: Sequence[Path], progress: Progress | None
    ) -> Iterator[Executor]:
        from ckptsurgeon.cli.dask_workers import connected

        with connected(on, folders) as cluster:
            _shown(cluster.tally, progress)
            yield cluster


@frozen
class Computed(Cluster):
    """What a command accepts that computes tensors."""

    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Note what is computed; go on from there where it was killed."
        ),
    ] = False

    @contextmanager
    def writers(
        self, jobs: int | None, folders: Sequence[Path], progress: Progress | None = None
    ) -> Iterator[Executor | None]:
        """The same; with `resume` threads of this process leave records, too."""
        from concurrent.futures import ThreadPoolExecutor

        from ckptsurgeon.disk import mount

        if self.shared or not self.resume:
            with super().writers(jobs, folders, progress) as who:
                yield who
            return
        with ThreadPoolExecutor(jobs or mount.threads(folders[0])) as pool:
            yield pool


def _told(progress: Progress | None) -> Told:
    """What counts the jobs of the tasks of an srun."""
    from ckptsurgeon.cli.tally import Done, Tally

    tally, began = Tally(), time.monotonic()
    _shown(tally, progress)

    def told(host: str, rank: int, took: float, size: int) -> None:
        tally.add(Done(host, str(rank), took, size, None))
        tally.seconds = time.monotonic() - began

    return told


def _shown(tally: Tally, progress: Progress | None) -> None:
    if progress is not None:
        progress.by, progress.last = tally.who, tally.told
