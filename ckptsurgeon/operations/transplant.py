"""The whole state of a step of another run, in the layout that this run's trainer saved.

The trainer of the new layout saves one step of a fresh run, and that is filled: no writer of
layouts is needed, and what the step does not hold can't be lost without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.capabilities import copies
from ckptsurgeon.formats.layout import numbered_inside
from ckptsurgeon.hints import command
from ckptsurgeon.operations import carried_logs, parameter_names, stands
from ckptsurgeon.operations.computed_changes import sources_of, with_copies
from ckptsurgeon.operations.events import TensorBoard
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.known_optimizer import knowing
from ckptsurgeon.operations.limits import COUNT
from ckptsurgeon.operations.numbered_parameters import order_of
from ckptsurgeon.operations.refusals import Refusals
from ckptsurgeon.operations.relaunch import Relaunch
from ckptsurgeon.operations.rollback import copied, relinked
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.operations.transplant_map import ParameterMap, parameter_map
from ckptsurgeon.operations.transplanted_numbers import COUNTERS, SOURCE, TEMPLATE, numbers
from ckptsurgeon.operations.transplanted_tensors import Tensors
from ckptsurgeon.plans.edits import AnyChange, NewStep, NewText, Renamed
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.run.other import open_other
from ckptsurgeon.run.run import Run


@held
class Transplant(Section):
    """Weights, masters, moments, counters and settings become those of `step` of the run `source`,
    element by element and field by field, whatever layout either has."""

    key: ClassVar[str] = "transplant"
    computes: ClassVar[bool] = True
    fills_parameters: ClassVar[bool] = True

    source: Annotated[
        str,
        Key(
            "the run whose weights, optimizer, counters and settings this one gets",
            "--from DIR",
            value="folder",
        ),
    ]
    step: Annotated[
        int | None,
        Key(
            "the step of that run; without it the newest complete one",
            "--step STEP",
            value="step",
            limits=COUNT,
        ),
    ] = None
    names: Annotated[
        str,
        Key(
            "a page that says what the parameters of that run are called in this one, or the name "
            "of one that is shipped",
            "--names FILE",
            value="file",
        ),
    ] = ""
    order: Annotated[
        str,
        Key(
            "the names of numbered parameters in the order of the optimizer, one a line",
            "--order FILE",
            value="file",
        ),
    ] = ""
    settings: Annotated[
        str,
        Key(
            "whose the settings of the param groups are: those of the source, parameter by "
            "parameter, or those of the new trainer",
            "--settings WHOSE",
            one_of=(SOURCE, TEMPLATE),
        ),
    ] = SOURCE
    require_all: Annotated[
        bool,
        Key(
            "refused where a parameter of either run is not in the other one",
            "--require-all",
        ),
    ] = False

    logs: Annotated[
        bool,
        Key(
            "the logs of that run, up to the step, become those of this one, whose own go to the "
            "attic",
            carried_logs.OPTION,
        ),
    ] = False

    def check(self, recipe: Recipe) -> None:
        events = recipe[TensorBoard]
        if self.logs and (events.after is not None or events.rename):
            raise UsageError(
                "both `transplant` with `logs` and `tensorboard` change the event files",
                next="apply a recipe with `transplant` alone, and then one with `tensorboard`",
            )
        for kind, section in recipe.given.items():
            own = kind in (Transplant, TensorBoard, Relaunch)
            if own or (stands(kind) and section == kind()):
                continue
            key = kind.key or kind.__name__.lower()
            raise UsageError(
                f"both `transplant` and `{key}` change the step",
                next=f"apply a recipe with `transplant` alone, and then one with `{key}`",
            )

    def reads(self, run: Run, step: int) -> list[Path]:
        source, number = self._source(run)
        events = carried_logs.reads(source) if self.logs else []
        return [*sources_of(source, [number]), *events]

    def _source(self, run: Run) -> tuple[Run, int]:
        """The run and its step. Raises for a step that is not there, or not complete."""
        source = open_other(run, self.source)
        if source.root == run.root:
            raise UsageError(
                f"{source.root} is the run that is filled",
                next=command("rollback", "--to", "STEP", why="goes back to a step of a run itself"),
            )
        saved = source.steps()
        if self.step in saved and source.complete(self.step):
            return source, self.step
        newest = next((number for number in reversed(saved) if source.complete(number)), None)
        if self.step is None:
            if newest is None:
                raise source.none_complete()
            return source, newest
        status = command("status", why="list the complete steps", run=self.source)
        if self.step not in saved:
            raise UsageError(f"step {self.step} is not saved in {source.root}", next=status)
        also = "" if newest is None else f"; the newest complete one is {newest}"
        raise SurgeryError(f"step {self.step} of {source.root} is not complete{also}", next=status)

    def title(self, run: Run, step: int) -> list[str]:
        source, number = self._source(run)
        return [f"transplant step {number} of {source.root}"]

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        checkpoint = knowing(run, checkpoint)
        source, number = self._source(run)
        donor = knowing(source, source.checkpoint(number))
        for each, where in ((donor, source), (checkpoint, run)):
            if sentences := each.contradictions():
                raise SurgeryError(
                    f"step {each.step} of {where.root} is not sound: {sentences[0]}",
                    next=command("verify", each.step, run=str(where.root)),
                )
        tensors = self._tensors(run, checkpoint, source, donor, Refusals())
        changes: list[AnyChange] = with_copies(run, checkpoint, tensors.changes())
        warnings = tensors.sentences()
        if self.require_all and tensors.differing:
            raise SurgeryError(
                f"not every parameter is in both runs: {warnings[0]}",
                next="without --require-all they stay as they are, and the plan lists them",
            )
        settings, sentences = numbers(run, checkpoint, donor, tensors, self.settings == SOURCE)
        changes += settings
        inside = numbered_inside(run.format)
        if inside and not checkpoint.locate("iteration"):
            raise SurgeryError(
                f"{checkpoint.path.name} is of a trainer that counts its updates in a place which "
                f"no surgery writes, and would go on from step {checkpoint.step}",
                next="fill a step of a trainer that is not on Lightning: docs/transplant.md",
            )
        changes += _renamed(run, checkpoint, donor.state().step)
        if not checkpoint.locate("iteration") and not any(isinstance(c, NewStep) for c in changes):
            raise SurgeryError(
                f"neither {checkpoint.path.name} nor its name says how many updates were made",
                next=command("show", why="what it keeps"),
            )
        if writers := source.trainer():
            sentences.append(f"{source.root}: {writers}; step {number} is read as it is now")
        after = checkpoint.after(changes, run.root).state().promise
        wanted = donor.state().promise
        if after.step != wanted.step:
            raise SurgeryError(
                f"the next step of {checkpoint.path.name} would be {after.step} and not "
                f"{wanted.step}: where its trainer counts its updates is not known",
                next=command("show", why="what it keeps"),
            )
        sentences += _unlike(run, wanted, after)
        if self.logs:
            events, told = carried_logs.logs(run, source, donor, carried_logs.leave_alone())
            changes += events
            sentences += told
        return changes, [*warnings, *sentences]

    def _tensors(
        self, run: Run, checkpoint: Checkpoint, source: Run, donor: Checkpoint, refusals: Refusals
    ) -> Tensors:
        alike = run.format.name == source.format.name
        order = order_of(self.order) if self.order else []
        names = parameter_names.read(self.names)
        return Tensors(run, checkpoint, donor, alike, names, order, refusals)

    def parameters(self, run: Run, checkpoint: Checkpoint) -> ParameterMap:
        """Which parameter is filled from which, with every refusal that `changes` would stop at,
        not the first alone."""
        source, number = self._source(run)
        known, donor = knowing(run, checkpoint), knowing(source, source.checkpoint(number))
        refusals = Refusals(kept=True)
        tensors = self._tensors(run, known, source, donor, refusals)
        tensors.changes()
        if not refusals.by_name:  # of what is no parameter
            with refusals.of():
                self.changes(run, Recipe(self), checkpoint)
        return parameter_map(known.step, source.root, number, tensors)


def _renamed(run: Run, checkpoint: Checkpoint, number: int) -> Iterator[AnyChange]:
    """The step counts as `number`, in the names of its files and folders too, and the pointers name
    it. Raises SurgeryError where another one has that name."""
    step, repeated = checkpoint.step, copies(checkpoint)
    if number == step:
        return
    if number in run.steps():
        raise SurgeryError(
            f"step {number} is saved in {run.root} already, and the transplant would be it",
            next="transplant into a fresh run with one saved step",
        )
    new: dict[Path, Path] = {}
    for entry in run.entries(step):
        name = _with_number(entry.name, step, number)
        if name != entry.name:
            new[entry] = entry.with_name(name)
            file, renamed = run.relative(entry), Renamed(name)
            yield NewStep(file, "step", entry.name, renamed, step=number)
    for path, old in run.format.pointers(run.root, step).items() if new else ():
        if isinstance(old, str):
            text = _with_number(old, step, number)
            yield NewText(run.relative(path), "latest", whole_file.text(path), text)
        elif disk.is_link(path):
            entry = next(name for name in new if old == name or name in old.parents)
            yield relinked(run, path, new[entry] / old.relative_to(entry))
        elif path not in repeated:  # a copy of the shard as it will be, called as it was still
            yield copied(run, path, old)


def _with_number(name: str, step: int, number: int) -> str:
    """The name with the number of another step. Raises SurgeryError where it has more than one that
    could be it, or counts something else as well."""
    found = list(re.finditer(rf"(?<!\d)0*{step}(?!\d)", name))
    found = [each for each in found if name[: each.start()].endswith(STEP)] or found
    if len(found) > 1 or "consumed_samples=" in name:
        raise SurgeryError(
            f"{name} would be step {number}, and which of its numbers say that is not clear",
            next="let the new trainer name its steps by their number alone",
        )
    if not found:
        return name
    (old,) = found
    digits = f"{number:0{len(old[0])}d}" if old[0].startswith("0") else str(number)
    return f"{name[: old.start()]}{digits}{name[old.end() :]}"


STEP = ("step", "step=", "step_", "step-")
"""What stands before the number of a step, where a name has several numbers."""


def _unlike(run: Run, wanted: Promise, made: Promise) -> Iterator[str]:
    """A sentence for each value that the next step of the source would use and this one will not,
    with what sets it, and one for those that the source does not say."""
    unsaid = []
    for name in Promise.values():
        old, new = getattr(wanted, name), getattr(made, name)
        if old == new or name in (*ELSEWHERE, *made.not_understood):
            continue
        if isinstance(old, tuple) and isinstance(new, tuple) and set(old) == set(new):
            continue  # of param groups that are in another order
        if not old and new is None and isinstance(old, tuple):
            continue  # the source skips nothing, and neither will a step that can't say so
        if name == "lr" and wanted.rewarm and made.rewarm is None:
            continue  # the window is why
        if old is None:
            unsaid += [f"{name} {new}"] if name not in COUNTERS else []  # which `numbers` says
            continue
        here = "is not kept here" if new is None else f"is {new} here"
        yield f"{name} is {old} in the source and {here}: {_set_by(run, name, old, made)}"
    if unsaid:
        yield f"as the new trainer has it, for the source does not say: {', '.join(unsaid)}"


def _set_by(run: Run, name: str, value: Any, made: Promise) -> str:
    """What makes the new trainer use a value that the step can't hold."""
    if name == "skip":
        how = run.format.advise_skip(value)
        words = [f"{first}-{last}" for first, last in value]
        return how if isinstance(how, str) else f"{command('skip', *words)} says what can be done"
    if name == "rewarm" and value:
        return (
            f"the next rate is {made.lr}; transplant a step whose schedule is at "
            f"{count(value[2], 'sample')} or beyond, or hold the rate back in the new trainer"
        )
    if name == "loss_scale" and made.loss_scale == 1.0:
        return "without fp16 there is none"
    return run.format.advise(name, value)


ELSEWHERE = ("groups", "settings", "optimizer")
"""Of an optimizer its states decide, which both have."""


# --- commands ------------------------------------------------------------------------------------


def transplant(section: Transplant) -> Recipe:
    """Fill this run with a step of another one.

    The new trainer, at its new sizes, saves one step of a fresh run. Then every weight, fp32 master
    and moment, every counter and setting in it becomes that of the other run: across ZeRO stages,
    data-, tensor- and pipeline-parallel sizes.

    Examples:
    ckptsurgeon transplant --from ../old --step 6
    ckptsurgeon transplant --from ../old --print-map
    ckptsurgeon transplant --from ../old --require-all --dry-run
    """
    return Recipe(section)


COMMANDS = {"transplant": transplant}
