"""ready: what the next start of the trainer loads, and whether it is sound."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.options import AllowGlobal, Common, Jobs
from ckptsurgeon.errors import SurgeryError, UsageError, VerificationFailed
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.hints import again
from ckptsurgeon.look import soundness
from ckptsurgeon.look.ready import Readiness, may_hold_steps, nothing_saved, shadows
from ckptsurgeon.look.ready import ready as look
from ckptsurgeon.report.style import Style
from ckptsurgeon.transaction.receipts import next_id

if TYPE_CHECKING:
    from ckptsurgeon.operations.section import Recipe
    from ckptsurgeon.progress import Progress
    from ckptsurgeon.run.run import Run

PAUSE_S = 0.05
"""How often to look whether a surgery has ended."""


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
    jobs: Jobs = 8,
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
    run = _open(common, from_scratch)
    if run is None:
        seen = nothing_saved(common.run_dir or Path(), depth, from_scratch)
    else:
        quiet = common.quiet or common.as_json or depth < soundness.CRC
        with report.Progress(sys.stderr, quiet=quiet) as progress:
            seen = decide(
                run, depth, repair=repair and not common.dry_run, from_scratch=from_scratch,
                wait=wait, jobs=jobs, allow_globals=allow_global or (), progress=progress,
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
        absent = from_scratch and not os.path.lexists(folder)
        if absent or (folder.is_dir() and not may_hold_steps(folder)):
            return None
        raise


def decide(
    run: Run,
    level: int,
    *,
    repair: bool = False,
    from_scratch: bool = False,
    wait: float = 0,
    jobs: int = 8,
    allow_globals: Collection[str] = (),
    progress: Progress | None = None,
) -> Readiness:
    """What the next start loads, once nobody works on the run; `repair` mends it before. Of several
    processes one repairs: the others wait for its lock, and look at the one step that it led to.

    Raises SurgeryError where a repair is refused or the lock is held for longer than `wait`."""
    end = time.monotonic() + wait
    while True:
        while run.under_way() and time.monotonic() < end:
            time.sleep(PAUSE_S)
        look_again()
        before = next_id(run.root)
        refused = None
        try:
            if repair and run.interrupted():
                from ckptsurgeon.surgery import recover

                recover(run)
                before = next_id(run.root)
            seen = look(run, level=level, from_scratch=from_scratch, jobs=jobs, progress=progress)
            if repair and seen.sound is not None:
                seen = _repaired(run, seen, jobs, allow_globals)
            if seen.ready or seen.receipt is not None:
                return seen
        except SurgeryError as error:
            refused = error
        meanwhile = run.under_way() is not None or next_id(run.root) != before
        if meanwhile and time.monotonic() < end:
            continue  # another process changed what was looked at
        if refused is not None:
            raise refused
        return seen


def _repaired(run: Run, seen: Readiness, jobs: int, allow_globals: Collection[str]) -> Readiness:
    """What is there after the surgery; `seen` where none would help."""
    from ckptsurgeon.surgery import apply, plan

    recipe = _recipe(run, seen)
    wanted = None if recipe is None else plan(run, recipe, allow_globals=allow_globals)
    if wanted is None or wanted.empty:
        return seen
    receipt = apply(run, wanted, jobs=jobs)
    look_again()
    return replace(look(run, level=seen.level, jobs=jobs), receipt=receipt.id)


def _recipe(run: Run, seen: Readiness) -> Recipe | None:
    """The pointers name the sound step. Without pointers, and where a mark keeps that step from
    being loaded, what is in the way goes to the attic; the logs stay as they are. What is newer
    and lies outside the run's own steps is a person's to judge."""
    from ckptsurgeon.operations.events import TensorBoard
    from ckptsurgeon.operations.rollback import Repair, Rollback
    from ckptsurgeon.operations.section import Recipe

    assert seen.sound is not None
    ahead = any(step > seen.sound for step in run.steps())
    others = shadows(run, seen.sound)
    if seen.sound == seen.step and not others:
        return None  # its bytes are sound, and something else is wrong
    marked = bool(others) and not ahead and all(each.step <= seen.sound for each in others)
    why = f"ready: {seen.found[0].what}"
    if marked or not run.format.pointers(run.root, seen.sound):
        return Recipe(Rollback(seen.sound), TensorBoard(truncate=False), why=why)
    return Recipe(Repair(seen.sound), why=why)


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
