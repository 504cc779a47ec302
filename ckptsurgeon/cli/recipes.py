"""plan, apply, undo, recover: surgery by recipe, and the one path that every edit takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptsurgeon import disk, report
from ckptsurgeon.cli.options import AllowGlobal, Cancelled, Common, Editing, OneLiner
from ckptsurgeon.cli.run import refuse_launch, start
from ckptsurgeon.edits import Plan, from_json, to_json
from ckptsurgeon.errors import UNTOUCHED, SurgeryError, UsageError

if TYPE_CHECKING:
    from ckptsurgeon.recipe.recipe import Recipe, Relaunch
    from ckptsurgeon.run.run import Run

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Laid over the recipe: set.lr=3e-5 rollback.to=6210"),
]


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file.")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Keep the plan for `apply`."),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 3 when there are changes.")
    ] = False,
    why: Annotated[
        str | None, typer.Option("--why", metavar="TEXT", help="The logbook line of the recipe.")
    ] = None,
    allow_global: AllowGlobal = None,
    *,
    common: Common,
) -> None:
    """Show what a recipe would change; change nothing."""
    from ckptsurgeon import surgery
    from ckptsurgeon.recipe.file import load

    wanted = _because(load(recipe, overrides or ()), why)
    run = common.open_run()
    made = surgery.plan(run, wanted, allow_globals=allow_global or ())
    if output is not None and not common.dry_run:
        _keep(made, output)
    _show(run, made, common)
    if exit_code and not made.empty:
        raise typer.Exit(3)


def apply(
    source: Annotated[
        Path, typer.Argument(metavar="RECIPE|PLAN.json", help="A recipe, or what `plan -o` wrote.")
    ],
    overrides: Overrides = None,
    *,
    common: Editing,
) -> None:
    """Carry out a recipe or a kept plan.

    All of it is done, or nothing."""
    from ckptsurgeon import surgery
    from ckptsurgeon.recipe.file import load

    if source.suffix != ".json":
        operate(common, load(source, overrides or ()))
        return
    if overrides or common.why is not None:
        raise UsageError(
            f"{source} is a finished plan; KEY=VALUE and --why belong to the recipe it came from",
            next=f"ckptsurgeon plan RECIPE KEY=VALUE -o {source}",
        )
    kept, run = read_plan(source), common.open_run()
    if common.dry_run:
        surgery.refuse_stale(run, kept)
    carry_out(run, kept, common)


def undo(
    receipt: Annotated[
        str | None, typer.Argument(metavar="ID", help="A receipt of `log` [the last one].")
    ] = None,
    *,
    common: Editing,
) -> None:
    """Bring back the bytes from before a surgery."""
    from ckptsurgeon import surgery

    run = common.open_run()
    made = surgery.plan_undo(run, receipt)
    if common.why is not None:
        made = replace(made, recipe={**made.recipe, "why": common.why})
    carry_out(run, made, common)


def recover(*, common: Common) -> None:
    """Finish or discard an interrupted surgery.

    Past its commit point it is finished, before it discarded; never anything between."""
    from ckptsurgeon import surgery

    run = common.open_run()
    if common.dry_run:
        waiting = run.interrupted()
        text = f"would finish or take back: {waiting}" if waiting else "nothing to recover"
        common.answer(lambda: text, lambda: {"schema": report.SCHEMA, "interrupted": waiting})
        return
    done = surgery.recover(run)
    common.report(
        lambda: common.here(report.recovery(done, common.style)), lambda: report.recovery_json(done)
    )


def one_section(common: OneLiner, data: Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
    """Carry out the recipe that the flags of a one-line command stand for, or print it."""
    from ckptsurgeon.recipe.file import from_data
    from ckptsurgeon.recipe.recipe import to_dict

    wanted = from_data(data, overrides)
    if common.print_recipe:
        wanted = _because(wanted, common.why)
        common.answer(lambda: report.recipe(wanted), lambda: to_dict(wanted))
        return
    operate(common, wanted)


def operate(common: Editing, wanted: Recipe) -> None:
    """plan → print → confirm → apply → print → relaunch, for every recipe wherever it came from."""
    from ckptsurgeon import surgery

    wanted = _because(wanted, common.why)
    if common.no_tb_note:
        wanted = replace(wanted, tensorboard=replace(wanted.tensorboard, note=False))
    run = common.open_run()
    made = surgery.plan(run, wanted, allow_globals=common.allow_global or ())
    carry_out(run, made, common, wanted.relaunch)


def carry_out(run: Run, plan: Plan, common: Editing, launch: Relaunch | None = None) -> None:
    """Print the plan, ask, apply it, print the receipt, relaunch.

    Raises SurgeryError when nobody says yes: without a terminal only --yes counts."""
    from ckptsurgeon import look, surgery

    if common.relaunch:
        refuse_launch(run)
    if common.dry_run:
        _show(run, plan, common)
        return
    if plan.empty:
        _show(run, plan, common)
    else:
        if not common.as_json:
            _show(run, plan, common)
        _confirm(plan, common)
        with report.Progress(sys.stderr, quiet=common.quiet) as progress:
            try:
                receipt = surgery.apply(run, plan, jobs=common.jobs, progress=progress)
            except KeyboardInterrupt:
                raise _stopped(run, plan) from None
        common.report(
            lambda: common.here(report.done(receipt, common.style, resumes=not run.bare)),
            lambda: report.plan_json(plan, run.format.name, receipt),
        )
    if common.relaunch:
        try:
            promise = plan.promise or look.inspect(run).promise
            start(run, promise, launch, (), common)
        except SurgeryError as error:
            if not plan.empty and error.untouched == UNTOUCHED:
                error.untouched = "the surgery stands; the trainer was not started"
            raise


def read_plan(path: Path) -> Plan:
    """What `plan -o` wrote. Raises UsageError for any other document."""
    try:
        found = from_json(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", next=_MAKE) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, Plan):
        raise UsageError(f"{path} is not a plan of this version of ckptsurgeon", next=_MAKE)
    return found


def _keep(plan: Plan, path: Path) -> None:
    try:
        real = path.parent.resolve() / path.name
        disk.write_new(real, json.dumps(plan, indent=1, default=to_json).encode())
    except FileExistsError:
        raise UsageError(f"{path} is there already", next="remove it, or name another") from None
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", next="-o FILE in a folder that is there"
        ) from None


_MAKE = "ckptsurgeon plan RECIPE -o plan.json"


def _show(run: Run, plan: Plan, common: Common) -> None:
    undone = next((item for item in run.receipts() if item.id == plan.undoes), None)
    common.answer(
        lambda: report.plan(plan, run.name, common.style, undone),
        lambda: report.plan_json(plan, run.format.name),
    )


def _stopped(run: Run, plan: Plan) -> SurgeryError:
    """Ctrl-C before the commit point or, when there is a receipt, before the verification."""
    if any(receipt.id == plan.id for receipt in run.receipts()):
        return Cancelled(
            f"{plan.title}: stopped by Ctrl-C when it was done, before it was verified",
            untouched="every byte from before the surgery is kept",
            next=("ckptsurgeon verify", f"ckptsurgeon undo {plan.id}"),
        )
    return Cancelled(f"{plan.title}: stopped by Ctrl-C", next="run the same command again")


def _because(wanted: Recipe, why: str | None) -> Recipe:
    return wanted if why is None else replace(wanted, why=why)


def _confirm(plan: Plan, common: Common) -> None:
    if common.yes:
        return
    if common.as_json or not sys.stdin.isatty():
        reason = (
            "--json shows no plan to confirm"
            if common.as_json
            else "there is no terminal to ask on"
        )
        raise SurgeryError(
            f"{plan.title}: {reason}, and --yes was not given",
            next=("the same command with --dry-run    look first", "the same command with --yes"),
        )
    question = f"{plan.title}: apply? [y/N] " if common.quiet else "apply? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        print(file=sys.stderr)  # Ctrl-D leaves the cursor behind the question
    if answer.strip().lower() not in ("y", "yes"):
        raise SurgeryError(f"{plan.title}: declined", next="the same command again, and answer y")
