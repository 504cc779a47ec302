"""Carries out a plan in one transaction, and holds the disk to what the plan promised."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ckptsurgeon.disk import mount
from ckptsurgeon.errors import SurgeryError, UsageError, VerificationFailed, count
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.one_look import look_again, one_look
from ckptsurgeon.hints import again, command
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.plans.promise import Promise, differences
from ckptsurgeon.progress import Progress
from ckptsurgeon.remote import reads
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction import journal, receipts, staging
from ckptsurgeon.transaction.entry import Entry, Step
from ckptsurgeon.transaction.names import edited
from ckptsurgeon.transaction.ranks import Ranks
from ckptsurgeon.transaction.recovery import Recovery

if TYPE_CHECKING:
    from ckptsurgeon.transaction.bucket.place import Place


@collector_paused()
@one_look()
def apply(
    run: Run,
    plan: Plan,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    workers: Executor | None = None,
) -> Receipt:
    """Commit `plan` in one transaction and verify its promise on a fresh read of the disk, `jobs`
    files at once, or as many as their file system bears. `workers`, which may be on other hosts,
    compute and copy what becomes new files; an attempt that was cut off is gone on with where the
    run was opened to resume it.

    Raises SurgeryError (the run is as it was), InterruptedSurgery (committed, not finished) or
    VerificationFailed (finished, and the disk does not hold what was promised)."""
    with reads.files_at_once(run.root, jobs):
        return _apply(run, plan, jobs or mount.threads(run.root), progress, workers)


def _apply(
    run: Run, plan: Plan, jobs: int, progress: Progress | None, workers: Executor | None
) -> Receipt:
    _refuse_other_run(run, plan)
    run.refuse_busy()
    if (place := _bucket(run)) is not None:
        from ckptsurgeon.transaction.bucket import journal as bucket

        receipt = bucket.commit(
            place,
            plan,
            logs=run.logs.named(),
            progress=progress,
            still=lambda: _refuse_written_since(run, plan),
        )
        look_again()  # what a mirror is made to look like is no change of a run
        if plan.promise is not None:
            _hold(run, receipt, plan.promise)
        return receipt
    receipt = journal.commit(
        run.root,
        plan,
        logs=run.logs.named(),
        jobs=jobs,
        workers=workers,
        resume=run.resuming,
        progress=progress,
        still=lambda: _refuse_written_since(run, plan),
    )
    if plan.promise is not None:
        _hold(run, receipt, plan.promise)
    return receipt


def help_with(run: Run, plan: Plan, ranks: Ranks) -> None:
    """Do this rank's share of a surgery that the last rank carries out, unless it is over. Raises
    SurgeryError where that one is not heard of, or has planned something else."""
    _refuse_other_run(run, plan)
    jobs = staging.jobs(run.root, plan)
    if not is_over(run, ranks):
        ranks.help(jobs)


def is_over(run: Run, ranks: Ranks) -> bool:
    """Whether a rank of that launch comes too late to help: a surgery is past its commit point, or
    theirs is done. What it would plan now goes by a mix, or is one more; where it is another's
    surgery that waits there, the last rank says so."""
    if run.committed() is True:
        return True
    return any(receipt.launch == ranks.start for receipt in run.receipts())


def refuse_stale(run: Run, plan: Plan) -> None:
    """Raise when a kept plan can't be applied any more, whoever is alive in the run. Reads only."""
    _refuse_other_run(run, plan)
    run.refuse_interrupted()
    _refuse_written_since(run, plan)
    journal.refuse_stale(run.root, plan, run.logs.named())


def _refuse_other_run(run: Run, plan: Plan) -> None:
    if Path(plan.run) != run.root:
        raise UsageError(
            f"the plan was made for {plan.run}, and this run is {run.root}",
            next=command("plan", "RECIPE", "-o", "plan.json", why="in this run"),
        )


def _refuse_written_since(run: Run, plan: Plan) -> None:
    """Raise when a step was saved or a log has grown since the plan was made: a trainer writes to
    the run, be it on a host that can't be seen from here."""
    look_again()
    new = sorted({*run.steps()} - {*plan.saved}) if plan.saved else []
    if new:  # right before the commit, the folder of a step that the plan makes may be there
        folders = {str(parent) for f in edited(plan.edits) for parent in PurePosixPath(f).parents}
        new = [n for n in new if folders.isdisjoint(map(run.relative, run.entries(n)))]
    sizes = run.logs.sizes()
    grown = [name for name, size in plan.sizes.items() if sizes.get(name, size) > size]
    if new:
        what = f"step {new[0]} was saved since the plan was made"
    elif grown:
        name = grown[0]
        what = f"{name} has grown since the plan was made, "
        what += f"from {count(plan.sizes[name], 'byte', spec=',')} to {sizes[name]:,}"
    else:
        return
    raise SurgeryError(
        f"{what}: a trainer writes to this run",
        next=again(why="it plans anew, once the trainer is gone"),
    )


def _hold(run: Run, receipt: Receipt, promise: Promise) -> None:
    try:  # compact and shrink rewrite any step, and nothing goes on from it
        step = run.latest() if receipt.steps or receipt.step is None else receipt.step
        differing = differences(promise, run.checkpoint(step).state().promise)
    except (SurgeryError, OSError) as error:
        raise receipts.unread(receipt.id, error) from error
    if differing:
        raise VerificationFailed(
            f"receipt {receipt.id} is not what was promised: {'; '.join(differing)}",
            untouched="every byte from before the surgery is kept",
            next=command("undo", receipt.id),
        )


@collector_paused()
def recover(run: Run) -> Recovery:
    """Finish a surgery that was cut off after its commit point, or take back one cut off before."""
    if (place := _bucket(run)) is not None:
        from ckptsurgeon.transaction.bucket import journal as bucket

        done = bucket.recover(place, logs=run.logs.named())
        look_again()
        return done
    return journal.recover(run.root, logs=run.logs.named())


def way_back(run: Run) -> Entry:
    """What `give_up` would do with a surgery that was cut off and can't be finished. Raises
    SurgeryError where there is none."""
    if _bucket(run) is not None:
        raise SurgeryError(
            "a surgery in a bucket can't be given up yet",
            next=(
                "put the object back as the surgery left it",
                command("recover", why="after that"),
            ),
        )
    from ckptsurgeon.transaction import giving_up

    return giving_up.plan(run.root, logs=run.logs.named())


@collector_paused()
def give_up(run: Run, planned: Entry) -> Recovery:
    """Take back what is still the surgery's, and leave what somebody else wrote: as `planned`, or
    not at all. The record of it names what was left."""
    from ckptsurgeon.transaction import giving_up

    return giving_up.give_up(run.root, planned, logs=run.logs.named())


def waiting(run: Run) -> tuple[Step, ...]:
    """The edits of a surgery that was cut off after its commit point. Raises InterruptedSurgery
    where `recover` would refuse them."""
    return journal.waiting(run.root, run.logs.named())


def _bucket(run: Run) -> Place | None:
    """Where the run is in its bucket; None on a disk, where nothing of a store is imported."""
    if reads.current() is None:
        return None
    from ckptsurgeon.transaction.bucket.place import Place

    return Place.of(run.root)
