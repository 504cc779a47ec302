"""ready: what the next start of the trainer loads, and whether it is sound."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import disk, report
from ckptsurgeon.cli.options import AllowGlobal, Common, Jobs
from ckptsurgeon.errors import SurgeryError, UsageError, VerificationFailed
from ckptsurgeon.guard.ready import decide
from ckptsurgeon.hints import again
from ckptsurgeon.look import soundness
from ckptsurgeon.look.ready import Readiness, may_hold_steps, nothing_saved
from ckptsurgeon.report.style import Style

if TYPE_CHECKING:
    from ckptsurgeon.run.run import Run


def ready(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- CMD", help="What to become once the run is ready."),
    ] = None,
    level: Annotated[
        int | None,
        typer.Option("--level", metavar="0..4", min=0, max=4, help="As of verify [2]."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The same as --level 0.")] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Lead the start to the newest sound step, not a newer one."),
    ] = False,
    print_path: Annotated[
        bool, typer.Option("--print", help="Print the path of the sound step, and nothing else.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--or-from-scratch", help="A run without any step is ready, too.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            help="How long to wait while another process works on the run.",
        ),
    ] = 600,
    jobs: Jobs = None,
    allow_global: AllowGlobal = None,
    *,
    common: Common,
) -> None:
    """Say if what the next start loads is sound; start a command if so.

    It follows the pointers as the trainer does and checks the one step that they lead to, as verify
    does. With --repair a start that would fail is led to the newest sound step that is not newer,
    in one surgery that undo takes back. With a command after -- it becomes that command, or exits
    with 4 (docs/ready.md).

    Examples:
    ckptsurgeon ready
    ckptsurgeon ready --repair --quick
    ckptsurgeon ready --repair -- torchrun train.py
    """
    _check(arguments, level is not None and quick, print_path, common)
    depth = soundness.NAMES if quick else soundness.MEANING if level is None else level
    from ckptsurgeon.disk import mount

    run = _open(common, from_scratch)
    if run is None:
        seen = nothing_saved(common.run_dir or Path(), depth, from_scratch)
    else:
        quiet = common.quiet or common.as_json or depth < soundness.CRC
        with report.Progress(sys.stderr, quiet=quiet) as progress:
            seen = decide(
                run, depth, repair=repair and not common.dry_run, from_scratch=from_scratch,
                wait=wait, jobs=jobs or mount.threads(run.root),
                allow_globals=allow_global or (), progress=progress,
            )  # fmt: skip
    _answer(seen, print_path, bool(arguments) and not common.dry_run, common)
    if not seen.ready:
        raise typer.Exit(VerificationFailed.exit_code)
    if arguments and not common.dry_run:
        _become(arguments)


def _check(command: list[str] | None, twice: bool, print_path: bool, common: Common) -> None:
    if twice:
        raise UsageError("--quick is --level 0", next=again(without=["--quick"]))
    if common.as_json and (print_path or command):
        other = "--print" if print_path else "a command"
        raise UsageError(f"--json and {other} don't go together", next=again(without=["--json"]))
    if print_path and command:
        raise UsageError(
            "--print is for a launcher, and this is one", next=again(without=["--print"])
        )


def _open(common: Common, from_scratch: bool) -> Run | None:
    """The run, or None for a folder without anything that may be a step, where no trainer has saved
    yet; one that is not there needs `from_scratch`."""
    try:
        return common.open_run()
    except UsageError:
        folder = common.run_dir or Path()
        absent = from_scratch and not disk.is_there(folder)
        if absent or (disk.is_folder(folder) and not may_hold_steps(folder)):
            return None
        raise


def _answer(seen: Readiness, print_path: bool, launches: bool, common: Common) -> None:
    """The answer goes to stdout, unless that is the launcher's or the command's."""
    if common.as_json or not (print_path or launches or (common.quiet and seen.found)):
        common.answer(lambda: report.ready(seen, common.style), lambda: report.ready_json(seen))
        return
    if seen.found or not (print_path or common.quiet):
        print(report.ready(seen, Style.of(sys.stderr)), file=sys.stderr)
    elif print_path and seen.path is not None:
        print(seen.path, flush=True)


def _become(command: list[str]) -> None:
    """Raises SurgeryError where there is no such program."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and a child would inherit
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SurgeryError(
            f"{command[0]} can't be started: {error.strerror}",
            next="name a program that is there",
        ) from None
