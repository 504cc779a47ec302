"""The one path of every edit: plan, print, ask, apply, print, relaunch."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ckptsurgeon import report
from ckptsurgeon.cli.on import Computed
from ckptsurgeon.cli.options import (
    Cancelled,
    Common,
    Declined,
    Editing,
    LogOneLiner,
    MapOneLiner,
    OneLiner,
    shown_first,
)
from ckptsurgeon.cli.parameter_types import parameter_types
from ckptsurgeon.errors import UNTOUCHED, SurgeryError
from ckptsurgeon.hints import DRY_RUN, Command, Hint, again, command
from ckptsurgeon.transaction.names import edited, outside_of_the_run
from ckptsurgeon.transaction.worker import worker

if TYPE_CHECKING:
    from ckptsurgeon.operations import Operation
    from ckptsurgeon.operations.relaunch import Relaunch
    from ckptsurgeon.operations.section import Recipe
    from ckptsurgeon.plans.plan import Plan, Receipt
    from ckptsurgeon.run.run import Run

LEADING = {"rollback", "repair_latest"}
"""Sections of a recipe that name a step."""
BY_ITSELF = Computed()
"""Threads of this process compute."""


def one_liner(operation: Operation, name: str) -> Callable[..., None]:
    """The command `name` of an operation, with the options of every edit: it carries out the recipe
    that was typed."""
    request = operation.command(name)
    kinds = operation.kinds()
    bundle: type[OneLiner] = OneLiner
    if any(kind.on_logs for kind in kinds):
        bundle = LogOneLiner
    elif any(kind.fills_parameters for kind in kinds):
        bundle = MapOneLiner
    bundles: dict[str, type[Any]] = {"common": bundle}
    if any(kind.computes for kind in kinds):
        bundles["computed"] = Computed

    def edit(*, common: OneLiner, computed: Computed = BY_ITSELF, **given: Any) -> None:
        _or_print(common, request(**given), computed)

    signature = inspect.signature(request)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        for name, kind in bundles.items()
    ]
    edit.__doc__ = request.__doc__
    edit.__name__ = request.__name__
    edit.__annotations__ = {**parameter_types(request), **bundles}
    edit.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *more]
    )
    return edit


def _or_print(common: OneLiner, recipe: Recipe, computed: Computed) -> None:
    """Carry out the recipe of a one-line command, or print it."""
    if common.print_recipe:
        from ckptsurgeon.recipe.file import to_data

        recipe = recipe.but(why=common.why)
        common.answer(lambda: report.recipe(recipe), lambda: to_data(recipe))
        return
    if isinstance(common, MapOneLiner) and common.print_map:
        _print_map(common, recipe)
        return
    operate(common, recipe, computed)


def _print_map(common: MapOneLiner, recipe: Recipe) -> None:
    """Which parameter a transplant would fill from which; a refusal is a row of it."""
    from ckptsurgeon.operations.transplant import Transplant

    run = common.open_run()
    run.refuse_interrupted()
    checkpoint = run.checkpoint(run.latest())
    made = recipe[Transplant].parameters(run, checkpoint)
    common.answer(
        lambda: report.parameter_map(made, run.name, common.style),
        lambda: report.parameter_map_json(made),
    )


def operate(
    common: Editing, recipe: Recipe, computed: Computed = BY_ITSELF, *, brief: bool = False
) -> None:
    """plan → print → confirm → apply → print → relaunch, for every recipe wherever it came from;
    `brief` as in `carry_out`."""
    from ckptsurgeon import surgery
    from ckptsurgeon.operations.events import TensorBoard
    from ckptsurgeon.operations.relaunch import Relaunch

    if computed.helper() is not None and not any(kind.computes for kind in recipe.given):
        return  # the last task does it alone; a plan beside its commit would read a mix
    recipe = recipe.but(why=common.why)
    if common.no_tb_note:
        recipe = recipe.but(replace(recipe[TensorBoard], note=False))
    with unless_late(common, computed):
        run = open_for(common, computed)
        plan = surgery.plan(run, recipe, allow_globals=common.allow_global or (), jobs=common.jobs)
        if computed.resume:
            _refuse_done(run, plan, recipe)
        carry_out(run, plan, common, recipe.get(Relaunch), computed, brief=brief)


@contextmanager
def unless_late(common: Common, computed: Computed) -> Iterator[None]:
    """What a task that only helps meets beside the commit of the last one, or after it, is no
    error: srun would end that one for it."""
    try:
        yield
    except (SurgeryError, OSError):
        from ckptsurgeon.files.one_look import look_again
        from ckptsurgeon.surgery.apply import is_over

        helper = computed.helper()
        look_again()
        if helper is None or not is_over(common.open_run(), helper):
            raise


def _refuse_done(run: Run, plan: Plan, recipe: Recipe) -> None:
    """Raise SurgeryError where the last surgery computed the same: a job that is requeued at its
    very end would scale, or average, once more."""
    from ckptsurgeon.recipe.file import keys
    from ckptsurgeon.transaction.receipts import standing

    last = standing(run.receipts())[-1:]
    if run.interrupted() is not None or not last:
        return
    names = [key for kind in recipe.given if kind.computes for key in keys(kind)]
    wanted, was = (
        json.dumps({name: each.get(name) for name in names}, sort_keys=True, default=str)
        for each in (plan.recipe, last[0].recipe)
    )
    if names and wanted == was and plan.step == last[0].step:
        raise SurgeryError(
            f"receipt {last[0].id} has done this already: {last[0].title}",
            next=again(without=["--resume"], why="does it once more"),
        )


def open_for(common: Common, computed: Computed = BY_ITSELF) -> Run:
    """The run, for a command that edits it: with a trainer alive there it can only be looked at."""
    helping = computed.helper() is not None
    run = replace(common.open_run(), resuming=computed.resume, helping=helping)
    if not common.dry_run:
        run.refuse_busy()
    return run


def carry_out(
    run: Run,
    plan: Plan,
    common: Editing,
    launch: Relaunch | None = None,
    computed: Computed = BY_ITSELF,
    *,
    brief: bool = False,
) -> None:
    """Print the plan, ask, apply it, print the receipt, relaunch. A `brief` one was shown before,
    or nobody is asked: its changes are left out, unless all is wanted.

    Raises SurgeryError when nobody says yes: without a terminal only --yes counts."""
    from ckptsurgeon.surgery import apply
    from ckptsurgeon.surgery.apply import help_with
    from ckptsurgeon.transaction.receipts import unread

    if (helper := computed.helper()) is not None:
        if not (common.dry_run or plan.empty):
            help_with(run, plan, helper)
        return
    if common.relaunch:
        from ckptsurgeon.cli.launch import refuse_launch

        refuse_launch(run, common)
    if common.dry_run:
        show(run, plan, common, then=again(without=DRY_RUN))
        return
    if plan.empty:
        replace(run, resuming=False).refuse_interrupted()
        show(run, plan, common)
    else:
        if not common.as_json:
            with shown_first():
                show(run, plan, common, brief=brief and not common.verbose)
        confirm(plan.title, "apply?", common)
        with (
            report.Progress(sys.stderr, quiet=common.quiet) as progress,
            computed.writers(common.jobs, [run.root], progress) as who,
        ):
            try:
                receipt = apply(run, plan, jobs=common.jobs, workers=who, progress=progress)
            except KeyboardInterrupt:
                raise _stopped(run, plan) from None
        try:
            common.report(
                lambda: report.done(
                    receipt,
                    common.style,
                    back=back(run, receipt),
                    resume=_resume(run, plan),
                    check=_check(run, plan),
                    whole={*plan.steps} <= {*plan.saved},
                ),
                lambda: report.plan_json(plan, run.format.name, receipt),
            )
        except (SurgeryError, OSError) as error:
            raise unread(receipt.id, error) from error
    if common.relaunch:
        try:
            from ckptsurgeon.cli.launch import start

            promise = plan.promise or run.state(run.latest()).promise
            start(run, promise, launch, (), common, asked=True)
        except SurgeryError as error:
            if not plan.empty and error.untouched == UNTOUCHED:
                error.untouched = "the surgery stands; the trainer was not started"
            raise


def back(run: Run, receipt: Receipt) -> Command:
    """What takes it back: an undo; a redo, if it is an undo itself."""
    if receipt.undoes is None:
        return command("undo", receipt.id)
    undone = next(each for each in run.receipts() if each.id == receipt.undoes)
    return command("redo") if undone.undoes is None else command("undo", undone.undoes)


def _resume(run: Run, plan: Plan) -> Hint:
    """How the run goes on: by relaunch where it is known how its trainer is started."""
    if run.bare:
        return ""
    if run.launchable:
        return command("relaunch")
    from ckptsurgeon.launch.flags import takes_flags

    if takes_flags(run):
        return command(
            "relaunch", "--print-flags", why="prints the flags to start its trainer with"
        )
    if plan.undoes is not None:
        return f"restart its trainer with the command that you used before {plan.undoes}"
    named = run.format.resume_option(run.root, run.latest())
    start = "restart its trainer with the same command" + (f" and {named}" if named else "")
    return start + (", unless a note above says otherwise" if plan.warnings else "")


def _check(run: Run, plan: Plan) -> Hint:
    """What holds a trainer to the promise where relaunch does not: by its event files, if it prints
    no rate."""
    from ckptsurgeon.logs.printed.mute import MUTE

    if run.bare or (run.launchable and (plan.promise is None or plan.promise.asked)):
        return ""
    folders = run.logs.folders() if run.format.name in MUTE else []
    if not folders:
        return command("verify", "--log", "FILE", why="compares what it prints with the plan")
    above = Path(os.path.commonpath([folder.parent for folder in folders]))
    shown = min(os.path.relpath(above), str(above), key=len)
    return command("verify", "--tb", shown, why="compares what it logs with the plan")


def show(
    run: Run,
    plan: Plan,
    common: Common,
    then: Hint = "",
    *,
    brief: bool = False,
    verbose: bool = False,
    wrote: Path | None = None,
) -> None:
    """Print a plan, that it can't be applied now if that is so, and with `then` the command that
    applies it; with `verbose`, or -v of an edit, what is done to each file, too. Of a plan that
    the command `wrote` somewhere, stderr is told where stdout takes no text."""
    notes = [f"{alive}; apply refuses until it is gone"] if (alive := run.trainer()) else []
    outside = sorted({str(PurePosixPath(file).parent) for file in outside_of_the_run(plan.edits)})
    if outside:
        notes.append(f"edits event files outside of the run, too: in {', '.join(outside)}")
    if plan.edits and (who := worker(run.root, edited(plan.edits))):
        notes.append(who)
    notes += _another_step(run, plan, common)
    plan = replace(plan, warnings=(*plan.warnings, *notes))
    done = {item.id: item for item in run.receipts()}
    undone = done.get(plan.undoes or "")
    redone = done.get(undone.undoes or "") if undone is not None else None

    def text() -> str:
        files = verbose or (isinstance(common, Editing) and common.verbose)
        look = common.style
        shown = report.plan(plan, run.name, look, undone, redone, brief=brief, files=files)
        return report.with_apply(shown, then) if then and not plan.empty else shown

    tell = common.answer if wrote is None else partial(common.report, wrote=wrote)
    tell(text, lambda: report.plan_json(plan, run.format.name))


def _another_step(run: Run, plan: Plan, common: Common) -> list[str]:
    """That a step's folder stands for its run, where another step is edited and none was named."""
    if plan.step is None or plan.undoes is not None or plan.recipe.keys() & LEADING:
        return []
    here = Path(common.run_dir or "").resolve()
    for step in run.steps() if here != run.root else ():
        inside = any(entry.resolve() in (here, *here.parents) for entry in run.entries(step))
        if inside and step != plan.step:
            what = f"{here.name} stands for its run: step {plan.step} is edited, not {step}"
            return [f"{what} (a rollback to {step} edits it, by --set and --reset)"]
    return []


def _stopped(run: Run, plan: Plan) -> SurgeryError:
    """Ctrl-C before the commit point or, when there is a receipt, before the verification."""
    if any(receipt.id == plan.id for receipt in run.receipts()):
        return Cancelled(
            f"{plan.title}: stopped by Ctrl-C when it was done, before it was verified",
            untouched="every byte from before the surgery is kept",
            next=(command("verify"), command("undo", plan.id)),
        )
    return Cancelled(f"{plan.title}: stopped by Ctrl-C", next=again())


def confirm(title: str, question: str, common: Common) -> None:
    """Ask whether to do what was shown. Raises SurgeryError when nobody says yes."""
    from ckptsurgeon.files.one_look import look_again

    if common.yes:
        return
    if common.as_json or not sys.stdin.isatty():
        reason = (
            "--json shows no plan to confirm"
            if common.as_json
            else "there is no terminal to confirm on"
        )
        raise SurgeryError(
            f"{title}: {reason}, and --yes was not given",
            next=(again("--dry-run", why="look first"), again("--yes")),
        )
    asked = f"{title}: {question} [y/N] " if common.quiet else f"{question} [y/N] "
    print(asked, end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    look_again()
    if not answer.endswith("\n"):
        print(file=sys.stderr)  # Ctrl-D leaves the cursor behind the question
    if answer.strip().lower() not in ("y", "yes"):
        raise Declined(f"{title}: declined", next=())
