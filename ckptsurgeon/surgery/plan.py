"""What a recipe would do to a run, byte for byte: every operation in turn, and what it promises."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptsurgeon import operations
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.collector import collector_paused
from ckptsurgeon.files.one_look import one_look
from ckptsurgeon.formats.fields.known_globals import refuse_unknown
from ckptsurgeon.formats.fields.trees import rounded
from ckptsurgeon.hints import again, command
from ckptsurgeon.operations.section import Recipe, Section
from ckptsurgeon.plans.edits import AnyChange, Aside, Change, NewStep, Rewrite
from ckptsurgeon.plans.log_fields import LOG_FIELDS
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import keys, to_data
from ckptsurgeon.remote import reads
from ckptsurgeon.run.run import Run
from ckptsurgeon.surgery.conflicts import refuse_conflicts
from ckptsurgeon.surgery.render import render, touched
from ckptsurgeon.surgery.renumbered import refuse_shadowed, renumbered
from ckptsurgeon.surgery.saved_again import kept_until_the_next_save
from ckptsurgeon.transaction import receipts
from ckptsurgeon.workers import side_by_side


@collector_paused()
@one_look()
def plan(
    run: Run, recipe: Recipe, *, allow_globals: Collection[str] = (), jobs: int | None = None
) -> Plan:
    """What `recipe` would do to `run`, byte for byte, the same for any number of `jobs`, which read
    the files. Reads only, also while a trainer is alive there: `apply` refuses then.

    A checkpoint that names a global outside `known_globals` and `allow_globals` is not edited, and
    no pointer is set to it.

    Raises SurgeryError when it can't be done in every shard, and names what to do instead."""
    with reads.files_at_once(run.root, jobs):
        return _plan(run, recipe, allow_globals)


def _plan(run: Run, recipe: Recipe, allow_globals: Collection[str]) -> Plan:
    run.refuse_interrupted()
    receipts.refuse_damaged(run.root)
    id = run.next_id()
    if run.bare:
        return _plan_logs(run, recipe, id)
    step = _target(run, recipe)
    # Before the first byte is read: what is changed from here on is found at the commit.
    saved, sizes = tuple(run.steps()), run.logs.sizes()
    files = run.format.files(run.root, step) if step in run.steps() else []
    for section in recipe.given.values():
        files += section.reads(run, step)
    names = [run.relative(file) for file in dict.fromkeys(files)]
    seen = dict(zip(names, side_by_side(run.fingerprint, names), strict=True))
    checkpoint = run.checkpoint(step)
    before = checkpoint.state()
    recipe = recipe.but(*(section.settled(before) for section in recipe.given.values()))
    sections = operations.in_order(recipe)
    changes: list[AnyChange] = []
    warnings: list[str] = []
    by_section: list[tuple[str, list[AnyChange]]] = []
    given = to_data(recipe)
    for section in sections:
        wanted, sentences = section.changes(run, recipe, checkpoint)
        new_changes = rounded(checkpoint, wanted, run.root)
        key = next((key for key in keys(type(section)) if key in given), "")
        by_section.append((key, new_changes))
        changes += [change for change in new_changes if not _idle(change)]
        warnings += sentences
    refuse_conflicts(by_section)
    if recipe.leads or any(change.field not in LOG_FIELDS for change in changes):
        changes += _rivals(run, recipe, step, changes)
    if any(isinstance(change, Change) or change.field == "latest" for change in changes):
        refuse_unknown(checkpoint.globals(), allow_globals)
    ahead = checkpoint.after(changes, run.root)
    for section, (_, new_changes) in zip(sections, by_section, strict=True):
        section.refuse_untaken(new_changes, ahead)
    after = ahead.state()
    title = _title(run, sections, step)
    edited = any(change.field not in LOG_FIELDS for change in changes)
    stay = _stay(run, changes)
    number = after.promise.step - 1
    if edited:
        refuse_shadowed(run, step, number, stay)
    later = [str(saved) for saved in renumbered(run, step, number, stay) if saved > number]
    if edited and later:
        warnings.append(
            f"already saved at or after the next step: {' '.join(later)}; the trainer will "
            "overwrite them, and undo can't bring them back"
        )
    if changes:
        named = next((c.step for c in changes if isinstance(c, NewStep)), step)
        changes += [c for s in sections for c in s.record(run, recipe, named, title)]
    edits = render(run, checkpoint, changes, id, seen.keys())
    warnings += kept_until_the_next_save(run, step, edits, id)
    assumed = dict.fromkeys([*touched(edits), *seen] if edits else [])
    return Plan(
        id=id,
        run=str(run.root),
        title=title,
        recipe=given,
        changes=tuple(changes),
        edits=tuple(edits),
        assumes=tuple(side_by_side(lambda file: seen.get(file) or run.fingerprint(file), assumed)),
        promise=receipts.with_caveats(run.receipts(), after.promise.with_caveats(warnings)),
        before=before.promise,
        warnings=(*after.notes, *warnings),
        step=step if edited else None,
        steps=tuple(stay) if edited else (),
        logs=tuple(sizes) if edited else (),
        saved=saved,
        sizes=sizes,
    )


def _plan_logs(run: Run, recipe: Recipe, id: str) -> Plan:
    """Only what works on logs, in a folder without checkpoints: there is no promise."""
    other = [key for kind in recipe.given if not kind.on_logs for key in keys(kind)]
    if other := sorted(to_data(recipe).keys() & set(other)):
        raise UsageError(
            f"{run.root} is a log directory without checkpoints: {', '.join(other)} has nothing to "
            "work on",
            next=again("-C", "RUN", why="RUN is the folder that holds the checkpoints"),
        )
    sections = [section for section in operations.in_order(recipe) if section.on_logs]
    sizes = run.logs.sizes()
    changes: list[AnyChange] = []
    warnings: list[str] = []
    for section in sections:
        new_changes, sentences = section.log_changes(run, recipe)
        changes += new_changes
        warnings += sentences
    title = _title(run, sections, 0)
    if changes:
        changes += [c for s in sections for c in s.record(run, recipe, None, title)]
    edits = render(run, None, changes, id)
    return Plan(
        id=id,
        run=str(run.root),
        title=title,
        recipe=to_data(recipe),
        changes=tuple(changes),
        edits=tuple(edits),
        assumes=tuple(run.fingerprint(file) for file in touched(edits)),
        promise=None,
        warnings=tuple(warnings),
        sizes=sizes,
    )


def _rivals(run: Run, recipe: Recipe, step: int, given: Sequence[AnyChange]) -> list[AnyChange]:
    """What the trainer would load in place of `step`, or keep before it, goes aside, unless it is
    `given`. Raises SurgeryError where it lies outside the run, or is newer and no section says that
    newer steps leave."""
    changes: list[AnyChange] = []
    leaves = {change.file for change in given if isinstance(change, Aside)}
    for rival in run.format.rivals(run.root, step):
        if not rival.paths or (rival.step > step and not recipe.leaves_newer):
            raise SurgeryError(
                f"{rival.what}, and {rival.harm.format(step)}",
                next=rival.remedy or command("rollback", "--to", step, why="moves it aside"),
            )
        files = (run.relative(path) for path in rival.paths)
        changes += [Aside(file, "checkpoint") for file in files if file not in leaves]
    return changes


def _target(run: Run, recipe: Recipe) -> int:
    """The step whose checkpoint is edited: the one that a section names, else the latest."""
    named = (section.target(run) for section in recipe.given.values())
    step = next((step for step in named if step is not None), None)
    return run.latest() if step is None else step


def _stay(run: Run, changes: list[AnyChange]) -> list[int]:
    """The saved steps that are still in the run after these changes. One that is left in a copy
    alone leaves with it, when that becomes a copy of another."""
    gone = {c.file for c in changes if isinstance(c, Aside) and c.field == "checkpoint"}
    anew = {c.file for c in changes if isinstance(c, Rewrite) and c.field == "latest"}
    if not gone and not anew:
        return run.steps()

    def stays(step: int) -> bool:
        own = {run.relative(path) for path in run.entries(step)}
        if own:
            return not gone & own
        return not anew.issuperset(map(run.relative, run.format.files(run.root, step)))

    return [step for step in run.steps() if stays(step)]


def _title(run: Run, sections: list[Section], step: int) -> str:
    parts = [part for section in sections for part in section.title(run, step)]
    return ", ".join(parts) or "nothing"


def _idle(change: AnyChange) -> bool:
    return isinstance(change, Change) and change.old == change.new
