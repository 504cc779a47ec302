"""compact, shrink, prune, unlock: they make room, or remove what can't be brought back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ckptsurgeon import report
from ckptsurgeon.cli.carry_out import carry_out, open_for
from ckptsurgeon.cli.options import Common, Declined, Editing, shown_first
from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.hints import DRY_RUN, Hint, again, command
from ckptsurgeon.operations.completion import saved_steps

if TYPE_CHECKING:
    from ckptsurgeon.run.run import Run

Step = Annotated[
    int | None,
    typer.Argument(metavar="STEP", help="A saved step [latest].", autocompletion=saved_steps),
]


LOSE = ("surgery would lose what it keeps", "surgeries would lose what they keep")


def compact(step: Step = None, *, common: Editing) -> None:
    """Rewrite edited shards without dead bytes.

    Values and tensors stay as they are. The old shards go to the attic; once they are pruned, no
    earlier surgery on them can be undone.

    Examples:
    ckptsurgeon compact
    ckptsurgeon compact 6 --dry-run
    """
    from ckptsurgeon import surgery

    run = open_for(common)
    carry_out(run, surgery.plan_compact(run, step, allow_globals=common.allow_global or ()), common)


def shrink(step: Step = None, *, common: Editing) -> None:
    """Rewrite shards that were saved with unused bytes.

    torch.save writes the whole storage of a view, which can make a file ten times as large. Values
    and tensors stay as they are; the old shards go to the attic.

    Examples:
    ckptsurgeon shrink --dry-run
    """
    from ckptsurgeon import surgery

    run = open_for(common)
    carry_out(run, surgery.plan_shrink(run, step, allow_globals=common.allow_global or ()), common)


def prune(
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", metavar="N", min=0, help="Keep the attics of the newest N surgeries."
        ),
    ] = None,
    *,
    common: Common,
) -> None:
    """Delete what past surgeries keep in the attic. There is no undo.

    Surgeries whose attic is removed, and all earlier ones, can no longer be undone. So --keep has
    no default. On a terminal you must type the run's name; elsewhere --yes works only together
    with --run.

    Examples:
    ckptsurgeon prune --dry-run
    ckptsurgeon prune --keep 3
    """
    from ckptsurgeon.run import attic

    run = common.open_run()
    run.refuse_interrupted()
    newest = [receipt.id for receipt in run.receipts()][-keep:] if keep else []
    listed = [item for item in attic.attics(run) if not newest or item.id < newest[0]]
    chosen = [item for item in listed if not item.stays]
    if common.dry_run or not chosen:
        then: Hint = again(without=DRY_RUN)
        if keep is None:
            then = command("prune", "--keep", "N", why="the newest N stay undoable", real=True)
        text = report.attic(listed, common.style)
        common.answer(
            lambda: report.with_apply(text, then) if chosen else text,
            lambda: report.attic_json(listed, False),
        )
        return
    if keep is None:
        raise UsageError(
            f"{count(len(chosen), *LOSE)}: --keep N says how many of the newest stay undoable",
            next=(
                command("prune", "--dry-run", why="what each of them keeps"),
                command("prune", "--keep", "1", why="the newest stays undoable"),
                command("prune", "--keep", "0", why="none does"),
            ),
        )
    if not common.as_json:
        with shown_first():
            common.answer(lambda: report.attic(listed, common.style), dict)
    _confirm_by_name(run, count(len(chosen), "attic"), common)
    try:
        attic.prune(run, chosen)
    except (OSError, KeyboardInterrupt) as error:
        raise SurgeryError(
            f"cut off: {error or 'Ctrl-C'}",
            untouched="the run itself; of these attics a part may be gone",
            next=again(why="remove the rest"),
        ) from error
    common.report(
        lambda: report.pruned(chosen),
        lambda: report.attic_json(listed, True),
    )


def unlock(*, common: Common) -> None:
    """Remove the lock of a surgery that died on another machine.

    First make sure that it is no longer running. A dead lock of this machine is removed
    automatically.

    Examples:
    ckptsurgeon unlock --dry-run
    """
    from ckptsurgeon.transaction import lock

    run = common.open_run()
    holder = lock.holder(run.root)
    if holder is None:
        common.answer(lambda: "nothing to unlock", lambda: {"schema": report.SCHEMA, "lock": None})
        return
    document = {"schema": report.SCHEMA, "lock": str(holder)}
    if common.dry_run:
        text = report.with_apply(f"would remove the lock of {holder}", again(without=DRY_RUN))
        common.answer(lambda: text, lambda: document)
        return
    _confirm_by_name(run, f"the lock of {holder}", common)
    lock.unlock(run.root, holder)
    common.report(lambda: f"unlocked: it was held by {holder}", lambda: document)


def _confirm_by_name(run: Run, what: str, common: Common) -> None:
    """--yes counts only beside -C, so that a command typed in the wrong folder removes nothing."""
    from ckptsurgeon.files.one_look import look_again

    if common.yes and common.run_dir is not None:
        return
    if common.yes or common.as_json or not sys.stdin.isatty():
        yes = () if common.yes else ("--yes",)
        why = "--yes counts only beside --run" if common.yes else "nobody confirmed it for this run"
        raise SurgeryError(
            f"{what}: this can't be undone, and {why}",
            next=again(*yes, "--run", run.root),
        )
    print(
        f"{what}: to remove for good, type the run's name ({run.name}): ", end="", file=sys.stderr
    )
    sys.stderr.flush()
    answer = sys.stdin.readline()
    look_again()
    if answer.strip() != run.name:
        raise Declined(f"{what}: declined", next=())
