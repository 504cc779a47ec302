"""plan, apply, undo, recover: surgery by recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import report, whole_file
from ckptsurgeon.cli import new_file
from ckptsurgeon.cli.carry_out import (
    back,
    carry_out,
    confirm,
    open_for,
    operate,
    show,
    unless_late,
)
from ckptsurgeon.cli.on import Computed
from ckptsurgeon.cli.options import AllowGlobal, Common, Editing, Jobs, Verbose, shown_first
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError, UsageError
from ckptsurgeon.hints import DRY_RUN, again, command
from ckptsurgeon.operations.completion import surgeries, undone
from ckptsurgeon.plans.as_json import Malformed, parsed, to_json
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.transaction.assumptions import AGAIN

if TYPE_CHECKING:
    from ckptsurgeon.operations.section import Recipe
    from ckptsurgeon.run.run import Run

STDIN = "-"
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Overrides for the recipe: set.lr=3e-5 rollback.to=6210"
    ),
]


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, or - for stdin.")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save the plan for `apply`."),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 3 when there are changes.")
    ] = False,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The reason, which `log` shows.")
    ] = None,
    verbose: Verbose = False,
    jobs: Jobs = None,
    allow_global: AllowGlobal = None,
    *,
    common: Common,
) -> None:
    """Show what a recipe would change, and change nothing.

    Examples:
    ckptsurgeon plan recipe.yaml
    ckptsurgeon plan recipe.yaml set.lr=2e-5 -o plan.json
    """
    from ckptsurgeon import surgery

    if recipe.suffix == ".json":
        raise UsageError(
            f"{recipe} is a finished plan, not a recipe",
            next=command("apply", recipe, "--dry-run", why="shows it"),
        )
    request = _request(recipe, overrides or ()).but(why=why)
    run = common.open_run()
    new_plan = surgery.plan(run, request, allow_globals=allow_global or (), jobs=jobs)
    wrote = None if common.dry_run else output
    if wrote is not None:
        new_file.write(wrote, json.dumps(new_plan, indent=1, default=to_json).encode())
        words = [str(wrote)]
    else:
        words = [str(recipe), *(overrides or ())]
        words += [f"--why={why}"] if why is not None else []
        words += [f"--allow-global={name}" for name in allow_global or ()]
    again_typed = "the recipe on stdin once more" if words[0] == STDIN else ""
    then = command("apply", *words, real=True, why=again_typed)
    show(run, new_plan, common, then, verbose=verbose, wrote=wrote)
    if exit_code and not new_plan.empty:
        raise typer.Exit(3)


def apply(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|PLAN.json", help="A recipe, or - for stdin, or what `plan -o` wrote."
        ),
    ],
    overrides: Overrides = None,
    *,
    common: Editing,
    computed: Computed,
) -> None:
    """Carry out a recipe or a saved plan.

    Either all of it is done, or nothing.

    Examples:
    ckptsurgeon apply recipe.yaml
    ckptsurgeon apply recipe.yaml set.lr=2e-5 --dry-run
    """
    from ckptsurgeon import surgery

    if source.suffix != ".json":
        operate(common, _request(source, overrides or ()), computed, brief=common.yes)
        return
    if overrides or common.why is not None:
        raise UsageError(
            f"{source} is a finished plan; KEY=VALUE and --why belong to the recipe it came from",
            next=command("plan", "RECIPE", "KEY=VALUE", "-o", source),
        )
    saved_plan = read_plan(source)
    try:
        with unless_late(common, computed):
            run = open_for(common, computed)
            if common.dry_run:
                surgery.refuse_stale(run, saved_plan)
            carry_out(run, saved_plan, common, computed=computed, brief=True)
    except SurgeryError as error:
        if AGAIN in error.hints:
            error.hints = (replace(_MAKE, why=f"{source} is stale: make a new plan"),)
        raise


def _request(source: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe in a file, or on stdin. A pipe of another name is refused, as nobody knows whether
    anything will ever come from it."""
    from ckptsurgeon.files.plain_yaml import MAX_BYTES
    from ckptsurgeon.recipe.file import load, read

    if source.is_fifo():
        raise UsageError(
            f"{source}: a pipe, not a file",
            next=again(swapped=(source, STDIN), why="reads the recipe from stdin"),
        )
    if str(source) != STDIN:
        return load(source, overrides)
    if sys.stdin is None:
        raise UsageError("stdin is closed, so no recipe comes from there", next="name a file")
    if sys.stdin.isatty():
        print("the recipe, then Ctrl-D:", file=sys.stderr)
    raw = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise UsageError(f"stdin: more than {MAX_BYTES} B", next="check that this is a recipe")
    return read(raw, overrides, where="stdin")


AsTheyAre = Annotated[
    bool,
    typer.Option(
        "--as-they-are", help="Restore what is left, though files were changed or removed since."
    ),
]


def undo(
    receipt: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="A receipt of `log` [the last one].", autocompletion=surgeries
        ),
    ] = None,
    as_they_are: AsTheyAre = False,
    *,
    common: Editing,
) -> None:
    """Restore the bytes from before a surgery.

    What it brings back is compared with what the surgery kept of it: small files by their sha256,
    shards by size and time. What somebody changed is refused by name, and so is an edited step
    that was removed since.

    Examples:
    ckptsurgeon undo
    ckptsurgeon undo 0001 --why "the lr was not the reason"
    """
    from ckptsurgeon import surgery

    run = open_for(common)
    _take_back(
        run, surgery.plan_undo(run, receipt, as_they_are=as_they_are, jobs=common.jobs), common
    )


def redo(
    receipt: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="A surgery that was undone [the last one].", autocompletion=undone
        ),
    ] = None,
    as_they_are: AsTheyAre = False,
    *,
    common: Editing,
) -> None:
    """Take back an undo: the surgery is in force again.

    The files are again what they were after the surgery, and what was trained on it comes back.
    It works until another surgery is done; what the trainer wrote since the undo goes to the attic.

    Examples:
    ckptsurgeon redo
    ckptsurgeon redo 0001 --why "the lr was the reason after all"
    """
    from ckptsurgeon import surgery

    run = open_for(common)
    _take_back(
        run, surgery.plan_redo(run, receipt, as_they_are=as_they_are, jobs=common.jobs), common
    )


def _take_back(run: Run, plan: Plan, common: Editing) -> None:
    """Carry out an undo or a redo, which have no recipe but a reason."""
    if common.why is not None:
        plan = replace(plan, recipe={**plan.recipe, "why": common.why})
    carry_out(run, plan, common, brief=common.yes)


def recover(
    give_up: Annotated[
        bool,
        typer.Option("--give-up", help="Take it back, except for files that others wrote."),
    ] = False,
    *,
    common: Common,
) -> None:
    """Finish or discard an interrupted surgery.

    A surgery that was past its commit point is finished, any other is discarded. The run is never
    left in between. Where a trainer has since written to a file of a surgery, it can't be finished:
    --give-up then makes every other file what it was before the surgery, leaves that one as it is,
    and says so. It asks first.

    Examples:
    ckptsurgeon recover
    ckptsurgeon recover --give-up --dry-run
    """
    from ckptsurgeon import surgery

    run = common.open_run()
    if give_up and run.interrupted() is not None:
        _give_up(run, common)
        return
    if common.dry_run:
        title = run.interrupted()
        steps = () if run.committed() is None else surgery.waiting(run)
        document = {"schema": report.SCHEMA, "interrupted": title, "files": report.acts(steps)}
        text = "nothing to recover: no surgery was interrupted"
        if title:
            text = report.waiting(title, run.committed(), steps, common.style)
            text = report.with_apply(text, again(without=DRY_RUN))
        common.answer(lambda: text, lambda: document)
        return
    done = surgery.recover(run)
    try:
        receipt = next((each for each in run.receipts() if each.id == done.receipt), None)
        taken_back = None if receipt is None else back(run, receipt)
        common.report(
            lambda: report.recovery(done, common.style, receipt, taken_back),
            lambda: report.recovery_json(done, receipt),
        )
    except (SurgeryError, OSError, KeyboardInterrupt) as error:
        if done.outcome == "nothing":
            raise
        raise done.unread(error) from error


def _give_up(run: Run, common: Common) -> None:
    """Print what is taken back and what is left, ask, do it, and print that."""
    from ckptsurgeon import surgery

    waits = surgery.way_back(run)
    title = f"give up {waits.title}"

    def text() -> str:
        shown = report.way_back(title, waits.todo, waits.left, common.style)
        return report.with_apply(shown, again(without=DRY_RUN)) if common.dry_run else shown

    if common.dry_run:
        files = report.acts(waits.todo)
        document = {"schema": report.SCHEMA, "interrupted": waits.title, "files": files}
        common.answer(text, lambda: {**document, "left": dict(waits.left)})
        return
    try:
        if (alive := run.trainer()) is not None:
            raise SurgeryError(
                alive, next="stop the trainer, wait until it is gone, then repeat it"
            )
        if not common.as_json:
            with shown_first():
                common.answer(text, dict)
        confirm(title, "give it up?", common)
    except SurgeryError as error:  # the run is not as it was: the surgery still waits
        what, next = error.what, error.next or again(why="asks again")
        raise InterruptedSurgery(what, untouched="nothing was touched", next=next) from None
    done = surgery.give_up(run, waits)
    try:
        common.report(
            lambda: report.recovery(done, common.style), lambda: report.recovery_json(done)
        )
    except (SurgeryError, OSError, KeyboardInterrupt) as error:
        raise done.unread(error) from error


def read_plan(path: Path) -> Plan:
    """What `plan -o` wrote. Raises UsageError for any other document."""
    try:
        document, wrong = parsed(whole_file.read(path, whole_file.MAX_RECORD)), ""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", next=_MAKE) from None
    except Malformed as error:
        document, wrong = None, f": {error}"
    if not isinstance(document, Plan):
        raise UsageError(f"{path} is not a plan of this version of ckptsurgeon{wrong}", next=_MAKE)
    return document


_MAKE = command("plan", "RECIPE", "-o", "plan.json")
