"""Back to a saved step: newer checkpoints go to the attic, every pointer names the step."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import SurgeryError, UsageError, first_few
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import Ranks
from ckptsurgeon.formats.layout import NamesElsewhere, NamesMore, linked
from ckptsurgeon.formats.step_folders import is_link, listed, number_of
from ckptsurgeon.hints import command, shell
from ckptsurgeon.operations import completion, swap_optimizer
from ckptsurgeon.operations.completion import saved_steps
from ckptsurgeon.operations.events import TensorBoard, refuse_both
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import COUNT
from ckptsurgeon.operations.place_changes import of_settings
from ckptsurgeon.operations.reset import Reset, states_of
from ckptsurgeon.operations.rewarm import Hold, Ramp, window
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.operations.set_commands import keys, of_pairs
from ckptsurgeon.operations.skip import Skip
from ckptsurgeon.plans.edits import (
    AnyChange,
    Aside,
    Content,
    NewText,
    Relink,
    Rewrite,
    Span,
)
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.run import Run

WEIGHTS = re.compile(r"(?:pytorch_|adapter_)?model\b.*\.(?:safetensors|bin|pt|pth)")
"""What files of weights are called, in a step and beside the steps."""
LAST = re.compile(r"(?:^|[-_.])(?:last|latest)(?:$|[-_.])")
"""What a link is called that leads to the newest step, as ms-swift's `last-checkpoint`."""


@held
class Rollback(Section):
    """Back to step `to`: newer checkpoints go to the attic, the pointers name `to`.

    Newer steps must leave, and not only lose the pointer: trainers that pick the highest step would
    go back to the abandoned branch, and retention would delete the new one first."""

    key: ClassVar[str] = "rollback"
    leaves_newer: ClassVar[bool] = True
    leads: ClassVar[bool] = True

    to: Annotated[
        int,
        Key(
            "that step becomes the latest; newer checkpoints go to the attic, event files are cut",
            value="step",
            limits=COUNT,
        ),
    ]

    def target(self, run: Run) -> int:
        return self.to

    def title(self, run: Run, step: int) -> list[str]:
        newest = max(run.steps())
        return [f"rollback {newest} → {step}" if newest != step else f"rollback to {step}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        later = (step for step in run.steps() if step > checkpoint.step)
        kept = run.format.pointers(run.root, checkpoint.step)  # a pointer changes where it lies
        newer = [path for step in later for path in run.entries(step) if path not in kept]
        newer += _by_name(run, checkpoint.step)
        asides = [Aside(run.relative(path), "checkpoint") for path in newer]
        changes, warnings = _repoint(run, recipe, checkpoint)
        forgotten, notes = _forget(run, checkpoint, newer)
        links, dangling = _links(run, checkpoint.step, newer, kept)
        notes = [*notes, *dangling, *(_final(run, checkpoint.step) if newer else [])]
        if isinstance(run.format, NamesMore):
            notes += run.format.unnamed(run.root, checkpoint.step, newer)
        return [*asides, *changes, *links, *forgotten], [*warnings, *notes]


@held
class Repair(Section):
    """The pointers name step `to`, or the newest complete checkpoint; no checkpoint moves."""

    key: ClassVar[str] = "repair_latest"
    leads: ClassVar[bool] = True

    to: Annotated[
        int | None,
        Key(
            "only the pointers change; without `to` they name the newest step that is "
            "complete and can be read",
            "--to STEP",
            "A saved step [the newest complete one].",
            value="step",
            limits=COUNT,
        ),
    ] = None

    def check(self, recipe: Recipe) -> None:
        if recipe.get(Rollback) is not None:
            raise UsageError(
                "`rollback` sets the pointers itself; it can't be combined with `repair_latest`",
                next="drop repair_latest",
            )

    def target(self, run: Run) -> int:
        return _newest(run) if self.to is None else self.to

    def title(self, run: Run, step: int) -> list[str]:
        return [f"repair latest → {step}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        changes, warnings = _repoint(run, recipe, checkpoint)
        over = [str(newer) for newer in run.steps() if newer > checkpoint.step]
        if over and not run.format.pointers(run.root, checkpoint.step):
            raise SurgeryError(
                "the trainer keeps no pointer and resumes the highest step",
                next=command("rollback", "--to", checkpoint.step, why="moves the later ones away"),
            )
        if self.to is None and over:
            warnings.append(f"newer steps are incomplete or damaged: {', '.join(over)}")
        return changes, [*warnings, *_under_other_names(run, checkpoint.step, self.to is None)]


def _under_other_names(run: Run, step: int, newest: bool) -> Iterator[str]:
    """What a pointer to `step` passes over, as by its name it is no step: a folder that has each
    file of one, as the save of a best evaluation has."""
    if not newest or not isinstance(run.format, NamesMore):
        return
    own = run.directory(step)
    names = {path.name for path in run.format.files(run.root, step) if path.parent == own}
    for folder in run.format.begun(run.root, step):
        number = number_of(folder.name)
        if number is None or not disk.is_folder(folder) or not names <= {*listed(folder)}:
            continue
        new = run.directory(number).name
        yield (
            f"{run.relative(folder)} is newer, and no step by its name: "
            f"{shell(['mv', folder, folder.with_name(new)])} makes it one, which this command takes"
        )


def _by_name(run: Run, step: int) -> list[Path]:
    """What else leaves with the steps after `step`. Raises SurgeryError with what may be theirs, as
    half of a step is worse than all of it."""
    if not isinstance(run.format, NamesMore):
        return []
    if unclear := run.format.unclear(run.root, step):
        path = unclear[0]
        more = f" (and {len(unclear) - 1} more)" if len(unclear) > 1 else ""
        raise SurgeryError(
            f"{run.relative(path)}{more} may be a part of a step after {step}, by the number in "
            "its name: no page says so, and names of its kind do not go with the saved steps",
            next=(
                "a page that has it under `files`, with {step} and `optional: true`, if it is: "
                "docs/described.md",
                shell(
                    ["mkdir", "-p", run.root.with_name(f"{run.root.name}.aside")],
                    ["mv", *unclear, run.root.with_name(f"{run.root.name}.aside")],
                    why="if it is not: outside of the run it is in nobody's way",
                ),
            ),
        )
    return run.format.begun(run.root, step)


def _newest(run: Run) -> int:
    """The newest step that is complete and can be read: a half-copied shard has its name, too."""
    problem: SurgeryError | None = None
    for step in reversed(run.steps()):
        if run.complete(step):
            try:
                run.checkpoint(step).state()
            except SurgeryError as error:
                problem = problem or error
                continue
            return step
    none = run.none_complete()
    raise none if problem is None else SurgeryError(problem.what, next=none.hints)


def _forget(run: Run, checkpoint: Checkpoint, gone: list[Path]) -> Changes:
    """What the trainer's own clean-up must not count on once `gone` has left."""
    able = Ranks.optional(checkpoint)
    if able is None:
        return [], []
    settings, warnings = able.forget(gone, run.format.pointer_files(run.root))
    return of_settings(run, settings), warnings


def _repoint(run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
    """Every pointer names the step of `checkpoint`, and the trainer's config its optimizer."""
    changes: list[AnyChange] = []
    pointers = run.format.pointers(run.root, checkpoint.step)
    for path, text in pointers.items():
        if isinstance(text, Path):
            if run.format.pointed(path) != checkpoint.step:
                link = linked(run.format, path)
                changes.append(relinked(run, path, text) if link else copied(run, path, text))
            continue
        old = whole_file.text(path)
        changes.append(NewText(run.relative(path), "latest", old, text))
    if recipe.get(swap_optimizer.SwapOptimizer) is None:
        changes += swap_optimizer.saved_config(run, checkpoint)
    if not isinstance(run.format, NamesElsewhere):
        return changes, []
    return changes, run.format.stale_pointers(run.root, checkpoint.step)


def _links(run: Run, step: int, gone: list[Path], known: Collection[Path]) -> Changes:
    """The links beside the steps that lead into what is `gone` and that no format knows. One that
    is called the last leads to the same place in `step`; any other is named, as it leads nowhere.
    """
    changes: list[AnyChange] = []
    notes: list[str] = []
    left = {path.resolve(): path for path in gone}
    own = run.entries(step)
    for folder in dict.fromkeys([run.root, *(path.parent for path in gone)]):
        for link in (folder / name for name in listed(folder)):
            if not is_link(link) or link in known or link in gone:
                continue
            end = link.resolve()
            entry = next((each for each in (end, *end.parents) if each in left), None)
            if entry is None:
                continue
            target = own[0] / end.relative_to(entry)
            if LAST.search(link.name) and len(own) == 1 and disk.exists(target):
                changes.append(relinked(run, link, target))
            else:
                notes.append(
                    f"{run.relative(link)} is a link to {left[entry].name}, which leaves: it leads "
                    "nowhere until something sets it anew"
                )
    return changes, notes


def _final(run: Run, step: int) -> list[str]:
    """The weights that a trainer saves beside the steps at its end, under the names that they have
    in a step: no number says which step they are of, so they stay."""
    beside = [name for name in listed(run.root) if WEIGHTS.fullmatch(name)]
    if not beside:  # as hardly ever, and a step may have ten thousand files
        return []
    own = run.format.files(run.root, step)
    inside = {path.name for path in own if path.parent != run.root}
    saved = max(path.stat().st_mtime for path in own)
    paths = [run.root / name for name in beside if name in inside]
    later = [path.name for path in paths if disk.is_file(path) and path.stat().st_mtime > saved]
    if not later:
        return []
    were = "was" if len(later) == 1 else "were"
    return [
        f"{first_few(later)} beside the steps {were} saved after step {step}, and may hold the "
        "weights of a step that leaves; no number says so, so nothing is done to it"
    ]


def relinked(run: Run, path: Path, target: Path) -> Relink:
    """The link at `path` leads to `target`, from the folder that it is in; a file becomes one."""
    old = str(path.readlink()) if disk.is_link(path) else ""
    return Relink(run.relative(path), "latest", old, os.path.relpath(target, path.parent))


def copied(run: Run, path: Path, shard: Path) -> Rewrite:
    """The file at `path` becomes a copy of `shard`."""
    content = Content((Span(run.relative(shard), 0, shard.stat().st_size),))
    new = not disk.exists(path)
    return Rewrite(run.relative(path), "latest", content, f"a copy of {shard.name}", new)


# --- commands ------------------------------------------------------------------------------------


def rollback(
    step: Annotated[
        int | None,
        typer.Argument(metavar="STEP", help="The same as --to.", autocompletion=saved_steps),
    ] = None,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="STEP", help="A saved step.", autocompletion=saved_steps),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="As `ckptsurgeon set`; repeatable.",
            autocompletion=keys,
        ),
    ] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option(
            "--reset",
            metavar="STATE",
            help="moments or loss-scale; repeatable.",
            autocompletion=completion.states,
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="A-B", help="Iterations to skip; repeatable."),
    ] = None,
    hold: Hold = None,
    ramp: Ramp = None,
    *,
    logs: Annotated[TensorBoard, "keep_as", "keep", "truncate"],
) -> Recipe:
    """Go back to a saved step.

    Newer checkpoints go to the attic, the pointers name the step, and event files are cut there.

    Examples:
    ckptsurgeon rollback --to 6
    ckptsurgeon rollback --to 6 --set lr=3e-5 --skip 7-8 --why "loss spike at 7"
    """
    if step is not None and to is not None:
        hints = [command("rollback", "--to", number) for number in dict.fromkeys((to, step))]
        raise UsageError("both STEP and --to were given", next=hints)
    target = to if step is None else step
    if target is None:
        raise UsageError("--to STEP is missing", next=command("status", why="list the steps"))
    refuse_both(logs)
    return Recipe(
        Rollback(target),
        of_pairs(settings or ()),
        Reset(states_of(reset or ())),
        *window(hold, ramp),
        Skip(skip or []),
        logs,
    )


def repair_latest(section: Repair) -> Recipe:
    """Make `latest` name a checkpoint that loads.

    Examples:
    ckptsurgeon repair-latest
    ckptsurgeon repair-latest --to 6
    """
    return Recipe(section)


COMMANDS = {"rollback": rollback, "repair-latest": repair_latest}
