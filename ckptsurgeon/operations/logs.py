"""Every log of the run in a surgery, whatever wrote it: cut with a rollback, or by itself."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.formats.layout import CountsSaves
from ckptsurgeon.hints import again
from ckptsurgeon.operations import carried_logs
from ckptsurgeon.operations.events import (
    TensorBoard,
    cut_or_rename,
    event_folders,
    linked,
    name_pairs,
    refuse_both,
)
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import COUNT
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import AnyChange
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.run.log_numbers import counts_steps
from ckptsurgeon.run.other import open_other
from ckptsurgeon.run.run import Run

if TYPE_CHECKING:
    from ckptsurgeon.logs.source import LogSource


@held
class Logs(Section):
    """In a rollback the logs that are no event files are cut as those are. `after` and `rename`
    are for all that the run has; what decides where event files prove nothing is said in
    `tensorboard`."""

    key: ClassVar[str] = "logs"
    on_logs: ClassVar[bool] = True

    after: Annotated[
        int | None, Key("cut every log there without a rollback", value="step", limits=COUNT)
    ] = None
    rename: Annotated[
        dict[str, str], Key("names in every log, all at once", value="`{old: new}`")
    ] = field(default_factory=dict)
    regex: Annotated[
        bool,
        Key(
            "a key of `rename` is a pattern for a whole name",
            "--regex",
            "OLD is a regular expression.",
        ),
    ] = False
    allow_merge: Annotated[bool, Key("a new name may be another one's", "--allow-merge")] = False
    of: Annotated[
        str | None,
        Key(
            "the logs of that run, up to the step, become those of this one, whose own go to the "
            "attic",
            value="a run's folder",
        ),
    ] = None

    def check(self, recipe: Recipe) -> None:
        events = recipe[TensorBoard]
        if self.of is None:
            return
        if (
            self.after is not None or self.rename or events.after is not None or events.rename
        ) or recipe.leaves_newer:
            raise UsageError(
                "`logs.of` brings logs that the same recipe would cut or rename",
                next="apply a recipe with `logs.of` alone, and then the other one",
            )

    def reads(self, run: Run, step: int) -> list[Path]:
        return [] if self.of is None else carried_logs.reads(self._source(run))

    def _source(self, run: Run) -> Run:
        source = open_other(run, str(self.of))
        if source.root == run.root:
            raise UsageError(
                f"{source.root} is the run that would get them",
                next="name another run in `logs.of`",
            )
        return source

    def title(self, run: Run, step: int) -> list[str]:
        parts = [] if self.after is None else [f"cut the logs after {self.after}"]
        parts += [] if self.of is None else [f"bring the logs of {self._source(run).root}"]
        if self.rename and self.regex:
            parts.append(f"rename what is logged like {', '.join(self.rename)}")
        elif self.rename:
            parts.append(f"rename {len(self.rename)} logged name{'s'[: len(self.rename) > 1]}")
        return parts

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        """A cut at the rollback step (or `after`), a rename, or the logs of another run."""
        if self.of is not None:
            source = self._source(run)
            by_name = isinstance(run.format, CountsSaves)  # the counter is no name of a step there
            donor = source.checkpoint(checkpoint.step if by_name else checkpoint.state().step)
            leave = again(
                without=(carried_logs.OPTION,),
                why="leaves the logs where they are",
                setting="logs.of=null",
            )
            return carried_logs.logs(run, source, donor, leave)
        back = recipe.leaves_newer and recipe[TensorBoard].truncate
        cut_at = checkpoint.step if self.after is None and back else self.after
        return self._of_logs(run, recipe[TensorBoard], cut_at, checkpoint)

    def log_changes(self, run: Run, recipe: Recipe) -> Changes:
        """The same without a checkpoint: the logs alone say which branch is meant."""
        return self._of_logs(run, recipe[TensorBoard], self.after, None)

    def _of_logs(
        self, run: Run, events: TensorBoard, cut_at: int | None, checkpoint: Checkpoint | None
    ) -> Changes:
        if cut_at is None and not self.rename:
            return [], []
        sources = run.log_sources()
        warnings = linked(run, checkpoint)
        if self.after is None and not self.rename:  # `tensorboard` has cut the others
            sources, warnings = sources[len(event_folders(run)) :], []
        elif events.after is not None or events.rename:
            raise UsageError(
                "`logs` and `tensorboard` would both edit the event files",
                next="give `logs` alone: it is for all",
            )
        wanted = replace(
            events,
            after=self.after if self.after is not None else events.after,
            rename=self.rename,
            regex=self.regex,
            allow_merge=self.allow_merge,
        )
        changes, sentences = cut_or_rename(
            run, sources, wanted, cut_at, checkpoint, by="rename-logs"
        )
        return changes, [*warnings, *sentences]

    def record(self, run: Run, recipe: Recipe, step: int | None, title: str) -> list[AnyChange]:
        """The surgery as a text, unless the recipe says no, in a log that has a place for one.
        Where each start of the trainer began a log, it is the one that ends soonest after the step,
        or else last. It is not behind a cut that the surgery makes, where the same cut would find
        it, and not in a log that counts what the steps may not, unless the recipe says where."""
        events = recipe[TensorBoard]
        cuts = [at for at in (events.after, self.after) if at is not None]
        steps = [at for at in (step, *cuts) if at is not None]
        if not events.note or not steps:
            return []
        at, unknown = min(steps), isinstance(run.format, CountsSaves)
        if cuts and (unknown or not events.truncate):  # what the log counts, and no step does
            at = min(cuts)
        text = f"**{title}**" + (f"\n\n{recipe.why}" if recipe.why else "")
        folders = event_folders(run)
        others = run.log_sources()[len(folders) :]
        if unknown and not cuts:
            folders, others = ([s for s in of if _counts_steps(run, s)] for of in (folders, others))
        if len(folders) > 1:
            ends = {folder: _ends(folder) for folder in folders}

            def far(folder: LogSource) -> tuple[bool, int]:
                reached = [end for end in ends[folder] if end >= at]
                return (False, min(reached)) if reached else (True, -max(ends[folder], default=0))

            folders = sorted(folders, key=far)
        for source in (*folders, *others):
            if note := source.note(at, text, time.time()):
                return note
        return []


def _counts_steps(run: Run, source: LogSource) -> bool:
    """Whether it has each saved step at its number, as far as that is known."""
    return any(counts_steps(run, end) for end in _ends(source))


def _ends(source: LogSource) -> list[int]:
    """Where its logs end; nowhere where they can't be read: a note needs none of it."""
    with suppress(SurgeryError):
        return [stream.last for stream in source.streams() if stream.last is not None]
    return []


# --- commands ------------------------------------------------------------------------------------


def truncate_logs(
    after: Annotated[int, typer.Option("--after", metavar="STEP", help="The last step to keep.")],
    section: Annotated[TensorBoard, "keep_as", "keep", "branch", "order", "samples", "salvage"],
) -> Recipe:
    """Cut every log of the run after a step.

    Event files, CSV and JSON lines: docs/logs.md. Works on a bare log directory too: --tb DIR.

    Examples:
    ckptsurgeon truncate-logs --after 6
    ckptsurgeon truncate-logs --after 6 --keep-tb before-the-spike --yes
    """
    refuse_both(section)
    return Recipe(Logs(after=after), section)


def rename_logs(
    tags: Annotated[
        list[str] | None,
        typer.Argument(metavar="OLD NEW …", help="Pairs of a logged name and its new one."),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A YAML file of `old: new`, or a recipe.",
        ),
    ] = None,
    *,
    section: Annotated[Logs, "regex", "allow_merge"],
) -> Recipe:
    """Rename what is logged, in every log of the run.

    All pairs take one pass over each log. Works on a bare log directory too: --tb DIR.

    Examples:
    ckptsurgeon rename-logs 'lm loss' 'lm-loss-training/lm loss'
    """
    return Recipe(replace(section, rename=name_pairs(tags, mapping, "logs", "rename-logs")))


COMMANDS = {"truncate-logs": truncate_logs, "rename-logs": rename_logs}
