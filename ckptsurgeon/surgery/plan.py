"""What a recipe would do to a run, byte for byte; the order of operations is one tuple."""

from __future__ import annotations

import time
from collections.abc import Collection

from ckptsurgeon.edits import (
    AnyChange,
    Change,
    Plan,
)
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.formats import State
from ckptsurgeon.formats.known_globals import refuse_unknown
from ckptsurgeon.operations.counters import counters
from ckptsurgeon.operations.events import events, note
from ckptsurgeon.operations.hyperparameters import hyperparameters
from ckptsurgeon.operations.replicas import replicas
from ckptsurgeon.operations.reset import reset
from ckptsurgeon.operations.rewarm import rewarm
from ckptsurgeon.operations.rollback import rollback
from ckptsurgeon.operations.skip import skip
from ckptsurgeon.operations.swap_optimizer import swap_optimizer
from ckptsurgeon.recipe.recipe import Recipe, absolute, to_dict
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.render import render, touched
from ckptsurgeon.transaction import receipts

OPERATIONS = (
    rollback,
    hyperparameters,
    counters,
    reset,
    rewarm,
    replicas,
    swap_optimizer,
    skip,
    events,
)


@collector_paused()
def plan(run: Run, recipe: Recipe, *, allow_globals: Collection[str] = ()) -> Plan:
    """What `recipe` would do to `run`, byte for byte. Reads only.

    A checkpoint that names a global outside `known_globals` and `allow_globals` is not edited, and
    no pointer is set to it.

    Raises SurgeryError when it can't be done in every shard, and names what to do instead."""
    run.refuse_busy()
    id = receipts.next_id(run.root)
    if run.bare:
        return _plan_logs(run, recipe, id)
    step = _target(run, recipe)
    # Before the first byte is read: what is changed from here on is found at the commit.
    files = run.format.files(run.root, step) if step in run.steps() else []
    seen = {file: run.fingerprint(file) for file in map(run.relative, files)}
    checkpoint = run.checkpoint(step)
    before = checkpoint.state()
    recipe = absolute(recipe, _present(before))
    changes: list[AnyChange] = []
    warnings: list[str] = []
    for operation in OPERATIONS:
        wanted, said = operation(run, recipe, checkpoint)
        changes += [change for change in wanted if not _idle(change)]
        warnings += said
    if any(isinstance(change, Change) or change.field == "latest" for change in changes):
        refuse_unknown(checkpoint.globals(), allow_globals)
    after = checkpoint.after(changes, run.root).state()
    warnings = [*after.notes, *warnings]
    if recipe.repair_latest is not None and recipe.repair_latest.to is None:
        over = [str(newer) for newer in run.steps() if newer > step]
        warnings += [f"newer, incomplete or damaged: {', '.join(over)}"] if over else []
    title = _title(run, recipe, step)
    edited = any(change.field != "tensorboard" for change in changes)
    stay = [s for s in run.steps() if recipe.rollback is None or s <= step]
    ahead = [str(s) for s in stay if s >= after.promise.step]
    if edited and ahead:
        warnings.append(
            f"saved already, and ahead of the next step: {' '.join(ahead)}; what the trainer saves "
            "again is written over, and no undo brings it back"
        )
    if changes:
        changes += note(run, recipe, step, title, time.time())
    edits = render(run, checkpoint, changes, id)
    assumed = dict.fromkeys([*touched(edits), *seen] if edits else [])
    return Plan(
        id=id,
        run=str(run.root),
        title=title,
        recipe=to_dict(recipe),
        changes=tuple(changes),
        edits=tuple(edits),
        assumes=tuple(seen.get(file) or run.fingerprint(file) for file in assumed),
        promise=after.promise,
        before=before.promise,
        warnings=tuple(warnings),
        step=step if edited else None,
        steps=tuple(stay) if edited else (),
        logs=tuple(run.logs.event_files()) if edited else (),
    )


def _plan_logs(run: Run, recipe: Recipe, id: str) -> Plan:
    """The log part of a recipe alone, in a folder without checkpoints: there is no promise."""
    other = to_dict(recipe).keys() - {"name", "why", "tensorboard"}
    if other:
        raise UsageError(
            f"{run.root} is a log directory without checkpoints: {', '.join(sorted(other))} has "
            "nothing to work on",
            next="the same command with -C RUN, the folder that holds the checkpoints",
        )
    changes, warnings = events(run, recipe, None)
    title = _title(run, recipe, 0)
    if changes and recipe.tensorboard.after is not None:
        changes += note(run, recipe, recipe.tensorboard.after, title, time.time())
    edits = render(run, None, changes, id)
    return Plan(
        id=id,
        run=str(run.root),
        title=title,
        recipe=to_dict(recipe),
        changes=tuple(changes),
        edits=tuple(edits),
        assumes=tuple(run.fingerprint(file) for file in touched(edits)),
        promise=None,
        warnings=tuple(warnings),
    )


def _target(run: Run, recipe: Recipe) -> int:
    """The step whose checkpoint is edited: of the rollback, of the repair, else the latest."""
    if recipe.rollback is not None:
        return recipe.rollback.to
    if recipe.repair_latest is not None:
        if recipe.repair_latest.to is not None:
            return recipe.repair_latest.to
        return _newest(run)
    return run.latest()


def _newest(run: Run) -> int:
    """The newest step that is complete and can be read: a half-copied shard has its name, too."""
    problem = SurgeryError(
        f"no complete checkpoint in {run.root}", next="ckptsurgeon status    what is missing"
    )
    for step in reversed(run.steps()):
        if run.complete(step):
            try:
                run.checkpoint(step).state()
            except SurgeryError as error:
                problem = error
                continue
            return step
    raise problem


def _present(state: State) -> dict[str, float | None]:
    """What a relative value scales: one number per key, or None where groups differ."""
    promise, schedule = state.promise, state.schedule or {}
    peak = promise.lr if state.peak_lr is None else state.peak_lr
    decays = {value for value in promise.weight_decay or () if value != 0}
    return {
        "lr": schedule.get("max_lr", peak),
        "min_lr": schedule.get("min_lr"),
        "eps": promise.eps,
        "weight_decay": decays.pop() if len(decays) == 1 else None,
        "clip_grad": promise.clip_grad,
        "loss_scale": promise.loss_scale,
    }


def _title(run: Run, recipe: Recipe, step: int) -> str:
    parts = []
    if recipe.rollback is not None:
        newest = max(run.steps())
        parts.append(f"rollback {newest} → {step}" if newest != step else f"rollback to {step}")
    if recipe.repair_latest is not None:
        parts.append(f"repair latest → {step}")
    given = recipe.set.given()
    if given:
        parts.append("set " + " ".join(f"{key}={_short(value)}" for key, value in given.items()))
    part = " ".join(str(item) for item in (recipe.moments.only, recipe.moments.params) if item)
    parts += [f"reset {state}{f' ({part})' if part else ''}" for state in recipe.reset]
    if recipe.rewarm is not None:
        parts.append(f"rewarm {recipe.rewarm.iterations} ({recipe.rewarm.kind})")
    if recipe.swap_optimizer is not None:
        parts.append(f"swap the optimizer for {recipe.swap_optimizer.to}")
    if recipe.sync_replicas is not None:
        parts.append("sync replicas")
    if recipe.clear_skip:
        parts.append("clear skip")
    if recipe.skip:
        how = " by counters" if recipe.skip_by_counters else ""
        parts.append(f"skip {' '.join(recipe.skip)}{how}")
    if recipe.tensorboard.after is not None:
        parts.append(f"cut events after {recipe.tensorboard.after}")
    if recipe.tensorboard.rename:
        tags = len(recipe.tensorboard.rename)
        parts.append(f"rename {tags} tag{'s' if tags > 1 else ''}")
    return ", ".join(parts) or "nothing"


def _short(value: object) -> str:
    """A number without digits that say nothing, as it could have been typed: 300000, 1e-05."""
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def _idle(change: AnyChange) -> bool:
    return isinstance(change, Change) and change.old == change.new
