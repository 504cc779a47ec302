"""watch: follow a run, and do by a policy what its trouble needs."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ckptsurgeon import disk
from ckptsurgeon.cli.advise import RunOrLogs
from ckptsurgeon.cli.options import Cancelled, Common
from ckptsurgeon.errors import SurgeryError, Unwritten, UsageError
from ckptsurgeon.hints import again, command
from ckptsurgeon.report import SCHEMA
from ckptsurgeon.report.style import clean

if TYPE_CHECKING:
    from ckptsurgeon.guard.policy import Policy
    from ckptsurgeon.guard.trainer import Process
    from ckptsurgeon.guard.watch import Watch
    from ckptsurgeon.logs.curves import Curves
    from ckptsurgeon.run.run import Run

RUNS_ON = "the trainer runs on"


def watch(
    policy: Annotated[
        Path | None, typer.Argument(metavar="POLICY", help="What it may do (docs/watch.md).")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, for cron.")] = False,
    start: Annotated[
        bool, typer.Option("--start", help="Start the trainer first, as relaunch does.")
    ] = False,
    pid: Annotated[
        int | None,
        typer.Option("--pid", metavar="N", min=1, help="The process that is the trainer."),
    ] = None,
    job: Annotated[
        bool,
        typer.Option("--job", help="Only stop the trainer; --after does the rest for the job."),
    ] = False,
    after: Annotated[
        int | None,
        typer.Option(
            "--after",
            metavar="STATUS",
            help="The trainer ended with it: exit with 0 if it is to start again.",
        ),
    ] = None,
    *,
    logs: RunOrLogs,
    common: Common,
) -> None:
    """Follow a run, and do by a policy what its trouble needs.

    It looks for a loss that diverges or is NaN, for a trainer that hangs, ends early or began
    anew without its optimizer. By default it writes a recipe, its plan and a picture, and tells a
    person by the policy's `notify`. With `do: apply` it stops the trainer, operates, checks the
    start and starts it again, within the policy's bounds. It exits 3 where a person is asked.

    Examples:
    ckptsurgeon watch --once
    ckptsurgeon watch night.yaml
    ckptsurgeon watch night.yaml --start
    """
    from ckptsurgeon.guard.policy import Policy, load

    _check(once, start, job, after)
    once = once or common.dry_run
    rules = Policy() if policy is None else load(policy)
    run = common.open_run()
    run.refuse_interrupted()
    if rules.acts and not once:
        _refuse_unattended(run, starts=not job and after is None)
    say = _saying(common, stamped=not once)
    made = _watch(rules, _process(pid), job, logs, common, say)
    with _ended_by_sigterm():
        well = _carried_out(made, run, once, start, after, common)
    if common.as_json:
        asked = made.asks(run) if after is not None else not well
        common.report(lambda: "the watch has ended", lambda: _document(made, run, asked))
    if not well:
        raise typer.Exit(3)


def _check(once: bool, start: bool, job: bool, after: int | None) -> None:
    given = {"--once": once, "--start": start, "--job": job, "--after": after is not None}
    asked = [name for name, is_given in given.items() if is_given]
    if len(asked) > 1:
        raise UsageError(
            f"{asked[0]} and {asked[1]} don't go together", next=again(without=[asked[1]])
        )


def _refuse_unattended(run: Run, starts: bool) -> None:
    """Raise where nobody could start the trainer when it has to be."""
    from ckptsurgeon.launch import written
    from ckptsurgeon.launch.relaunch import refuse_unknown_launch

    if not starts:
        return
    refuse_unknown_launch(run)
    if others := written.by_others(written.file(run)):
        raise SurgeryError(
            f"{others}, and says what to start: {clean(written.command(run))}; nobody is asked at "
            "night",
            next="make the file and its folder writable for you alone",
        )


def _process(pid: int | None) -> Process | None:
    from ckptsurgeon.guard.trainer import Process

    at = None if pid is None else Process.of(pid)
    if pid is not None and at is None:
        raise UsageError(
            f"--pid {pid}: no process of this host has that number",
            next="the number of the trainer, or of what has started it, on this host",
        )
    return at


def _watch(
    rules: Policy,
    at: Process | None,
    job: bool,
    logs: RunOrLogs,
    common: Common,
    say: Callable[[str], None],
) -> Watch:
    from ckptsurgeon.guard.trainer import Trainer
    from ckptsurgeon.guard.watch import Watch

    given = {"--format": common.format_name, "--optimizer": common.optimizer}
    options = [str(word) for name, value in given.items() if value for word in (name, value)]
    return Watch(
        _opening(common), _reading(logs), rules, say, Trainer(at, options), job=job,
        also=lambda run: [] if logs.log is None else [_log(run, logs.log)],
    )  # fmt: skip


def _opening(common: Common) -> Callable[[], Run]:
    """Opens the run anew: a surgery or a trainer may have changed all that was known of it."""
    root = common.open_run().root
    where = replace(common, run_dir=root)
    return where.open_run


def _reading(logs: RunOrLogs) -> Callable[[Run], Curves]:
    def read(run: Run) -> Curves:
        return (logs if logs.log is None else replace(logs, log=_log(run, logs.log))).read(run)

    return read


def _log(run: Run, file: Path) -> Path:
    """The log that was named; where it has ended and a watch has started the trainer since, what
    that prints."""
    from ckptsurgeon.guard.trainer import printed

    own = printed(run)
    there = file.stat().st_mtime if disk.is_file(file) else 0.0
    return own[0] if own is not None and own[1] > there else file


def _saying(common: Common, stamped: bool) -> Callable[[str], None]:
    stream = sys.stderr if common.as_json else sys.stdout

    def say(text: str) -> None:
        if not common.quiet:
            stamp = f"{time.strftime('%H:%M:%S')}  " if stamped else ""
            try:
                print(f"{stamp}{clean(text)}", file=stream, flush=True)
            except Unwritten as error:  # a full disk of its log ends no guard
                print(f"{error.what}; the watch goes on", file=sys.stderr)

    return say


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the watch as Ctrl-C does, so that its lock goes with it."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes signals there alone
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _carried_out(
    made: Watch, run: Run, once: bool, start: bool, after: int | None, common: Common
) -> bool:
    """True where nobody is asked; of one look, where nobody is asked anew."""
    from ckptsurgeon.transaction import lock

    if once and common.dry_run:
        return made.once(dry=True)
    try:
        with lock.hold(run.root, "watch", lock.WATCHER):
            if after is not None:
                return made.after(after)
            if once:
                return made.once()
            return made.follow(start=start)
    except KeyboardInterrupt:
        raise Cancelled(
            "the watch was stopped by Ctrl-C",
            untouched=RUNS_ON,
            next=command("watch", why="goes on where this one ended"),
        ) from None


def _document(made: Watch, run: Run, asked: bool) -> dict[str, object]:
    from ckptsurgeon.guard import event

    return {
        "schema": SCHEMA,
        "asked": asked,
        "events": [event.as_json(each, run.root) for each in made.done],
    }
