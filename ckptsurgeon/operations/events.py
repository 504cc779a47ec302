"""The event files in a surgery: every folder of them is cut, or its tags renamed.

What reads and writes event files is imported where it is used: most surgeries touch none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from ckptsurgeon.errors import UsageError, count
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.hints import command
from ckptsurgeon.operations.key import Key
from ckptsurgeon.operations.limits import COUNT
from ckptsurgeon.operations.section import Changes, Recipe, Section
from ckptsurgeon.plans.edits import AnyChange
from ckptsurgeon.plans.frozen import held
from ckptsurgeon.plans.log_fields import LOGS, TENSORBOARD
from ckptsurgeon.plans.promise import Caveat
from ckptsurgeon.run.beside import beside
from ckptsurgeon.run.log_numbers import Place, Tied, cutting, doubtful, not_known, tied
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.home import ROWS
from ckptsurgeon.transaction.receipts import standing

if TYPE_CHECKING:
    from ckptsurgeon.logs.likely import Likely
    from ckptsurgeon.logs.marks import Marks
    from ckptsurgeon.logs.new_names import Counts
    from ckptsurgeon.logs.source import LogSource, Stream

ORDERS = ("wall", "mtime", "name")


@held
class TensorBoard(Section):
    """Event files are cut by lineage, at the rollback step or `after`, or their tags renamed.

    `branch`, `order`, `axes` and `samples` decide what the logs can't prove (logs/lineage.py)."""

    key: ClassVar[str] = "tensorboard"
    on_logs: ClassVar[bool] = True

    truncate: Annotated[bool, Key("leave the logs alone in a rollback", "--no-truncate")] = True
    after: Annotated[
        int | None, Key("cut the event files there without a rollback", value="step", limits=COUNT)
    ] = None
    keep: Annotated[
        bool, Key("do not keep the cut events as a run of their own", "--no-keep-tb")
    ] = True
    keep_as: Annotated[
        str | None,
        Key(
            "keep the cut events as a TensorBoard run of this name", "--keep-tb NAME", value="name"
        ),
    ] = None
    rename: Annotated[
        dict[str, str], Key("tags, all at once: a → b and b → c do not chain", value="`{old: new}`")
    ] = field(default_factory=dict)
    regex: Annotated[
        bool,
        Key(
            "a key of `rename` is a pattern for a whole tag",
            "--regex",
            "OLD is a regular expression.",
        ),
    ] = False
    allow_merge: Annotated[bool, Key("a new name may be that of another tag", "--allow-merge")] = (
        False
    )
    branch: Annotated[
        list[str],
        Key(
            "an event file of the branch to keep, where several are possible",
            "--branch FILE",
            value="list of event files",
        ),
    ] = field(default_factory=list)
    order: Annotated[
        str | None,
        Key(
            "how to order files whose clocks disagree",
            "--order BY",
            "Order files by wall, mtime or name.",
            one_of=ORDERS,
        ),
    ] = None
    axes: Annotated[
        dict[str, str],
        Key(
            "what a tag counts on its x axis, when its name does not say",
            value="`{tag: iteration\\|samples\\|tokens\\|gigaflos}`",
            one_of=("iteration", "samples", "tokens", "gigaflos"),
        ),
    ] = field(default_factory=dict)
    samples: Annotated[
        int | None,
        Key("samples consumed there, where the logs do not say", "--samples N", limits=COUNT),
    ] = None
    salvage: Annotated[bool, Key("drop damaged records instead of refusing", "--salvage")] = False
    note: Annotated[bool, Key("do not write the surgery into the logs as a text")] = True

    def title(self, run: Run, step: int) -> list[str]:
        parts = [] if self.after is None else [f"cut events after {self.after}"]
        if self.rename and self.regex:
            parts.append(f"rename tags like {', '.join(self.rename)}")
        elif self.rename:
            parts.append(f"rename {count(len(self.rename), 'tag')}")
        return parts

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        """A cut at the rollback step (or `after`), or a rename. The checkpoint's own counters and
        save time say which branch is meant."""
        back = recipe.leaves_newer and self.truncate
        cut_at = checkpoint.step if self.after is None and back else self.after
        return self._of_event_files(run, cut_at, checkpoint)

    def log_changes(self, run: Run, recipe: Recipe) -> Changes:
        """The same without a checkpoint: the logs alone say which branch is meant."""
        return self._of_event_files(run, self.after, None)

    def _of_event_files(
        self, run: Run, cut_at: int | None, checkpoint: Checkpoint | None
    ) -> Changes:
        if cut_at is None and not self.rename:
            return [], []
        changes, warnings = cut_or_rename(run, event_folders(run), self, cut_at, checkpoint)
        return changes, [*linked(run, checkpoint), *warnings]


def cut_or_rename(
    run: Run,
    sources: Sequence[LogSource],
    section: TensorBoard,
    cut_at: int | None,
    checkpoint: Checkpoint | None,
    by: str = "rename-tb-events",
) -> Changes:
    """A cut of these logs at a step, or a rename of what they log, as `section` says; `by` is the
    command that renames."""
    if cut_at is not None and section.rename:
        raise UsageError(
            "one recipe can't both cut event files and rename their tags",
            next="do the rollback first, then the rename in a surgery of its own",
        )
    changes: list[AnyChange] = []
    warnings: list[str] = []
    counts: list[Counts] = []
    branch = _branch(run, section.branch)
    if cut_at is not None and sources:
        from ckptsurgeon.logs.event_folder import of_all
        from ckptsurgeon.logs.source import Cut

        found = Tied(dict.fromkeys(sources, Place(cut_at, cut_at)), [], [])
        if section.after is None and checkpoint is not None:
            found = tied(run, checkpoint, sources, cut_at)
        keep = (section.keep_as or f"cut-{run.next_id()}") if section.keep else None
        for source, place in found.at.items():
            marks = marks_at(place, checkpoint, section.samples)
            cut = Cut(marks, keep, section.salvage, branch, section.order, section.axes)
            made, sentences = source.cut(cut)
            changes += made
            warnings += sentences
        warnings = of_all(warnings, run.logs.folders())
        if found.unknown and checkpoint is not None:
            text = f"not cut: {not_known(run, found.unknown)}; {cutting(run, checkpoint.step)}"
            warnings.append(_of_logs(text, found.unknown))
        if found.doubtful and checkpoint is not None:
            text = doubtful(checkpoint.step, found.doubtful)
            warnings.append(_of_logs(text, found.doubtful))
    if section.rename:
        from ckptsurgeon.logs.source import NewNames

        names = NewNames(section.rename, section.regex, section.allow_merge)
        for source in sources:
            made, renamed = source.rename_keys(names)
            changes += made
            counts.append(renamed)
    if counts:
        warnings += _renamed(run, section, counts, by)
    return changes, warnings


def _of_logs(text: str, logs: Sequence[Stream]) -> Caveat:
    """What to know of logs whose numbers are not known, said of event files or of other logs."""
    return Caveat(text, TENSORBOARD if logs[0].kind == TENSORBOARD else LOGS, known=False)


def event_folders(run: Run) -> list[LogSource]:
    """The logs that are event files."""
    sources = run.log_sources()
    if not sources:
        return []
    from ckptsurgeon.logs.event_folder import EventFolder

    return [source for source in sources if isinstance(source, EventFolder)]


def linked(run: Run, checkpoint: Checkpoint | None) -> list[str]:
    """What to know of log folders that nothing is done with."""
    links = [
        f"{link}/ is a link, so its event files stay as they are; name it in "
        f"ckptsurgeon.yaml if they are this run's: tensorboard: [{link}]"
        for link in run.logs.links()
    ]
    others = [
        f"{folder}/ stays as it is: it has logs of {tracker}, which no surgery cuts"
        for folder, tracker in run.logs.strangers()
    ]
    lacking = [
        f"ckptsurgeon.yaml names the log folder {name}, which is not there: no log in it is edited"
        for name in run.logs.lacking()
    ]
    unnamed = [
        f"{name} stays as it is, and may be a log by its {what.by}: {_to_do(name, what)}"
        for name, what in run.logs.unnamed()
    ]
    return [*lacking, *links, *others, *unnamed, *_beside(run, checkpoint)]


def _to_do(name: str, what: Likely) -> str:
    """What makes a file a log of the run, or why nothing does."""
    if not what.cut:
        return "no surgery cuts it, as nothing at the top of its lines is known to count steps"
    if name.startswith("../"):
        return f"outside of a run only logs with these names are edited: {', '.join(ROWS)}"
    return f"if it is one of this run, name it in ckptsurgeon.yaml: logs: [{name}]"


def _beside(run: Run, checkpoint: Checkpoint | None) -> list[str]:
    """What to know of logs beside the run that were written to since its step was saved."""
    if checkpoint is None or run.bare:
        return []
    found = beside(run.root, run.logs.roots(), checkpoint.state().saved_at)
    return [each.told(run.root, checkpoint.step) for each in found]


def _renamed(run: Run, section: TensorBoard, counts: Sequence[Counts], by: str) -> list[str]:
    """What to know of a rename. Raises UsageError when no event has such a tag, nor had one before
    the same rename was done."""
    from ckptsurgeon.logs import new_names

    done = any(
        (receipt.recipe.get(key) or {}).get("rename") == section.rename
        for receipt in standing(run.receipts())
        for key in ("tensorboard", "logs")
    )
    everywhere = new_names.merged(counts)
    if not done:
        bare = ["--tb", run.root] if run.bare else []
        new_names.refuse_nowhere(everywhere, section.rename, bare, regex=section.regex, by=by)
    sentences = [text for each in counts for text in replace(each, unmatched=()).sentences()]
    return [*dict.fromkeys(sentences), *replace(everywhere, events={}, patterns=()).sentences()]


def _branch(run: Run, files: Sequence[str]) -> list[str]:
    """The names of the event files of the branch that is meant, however they were reached. Raises
    UsageError for one that is not there: it would decide nothing, silently."""
    there = sorted({Path(file).name for file in run.logs.event_files()}) if files else []
    names = [Path(file).name for file in files]
    for name in names:
        if name not in there:
            some = ", ".join(there[:3]) + (" …" if len(there) > 3 else "")
            raise UsageError(
                f"branch: no event file is called {name}", next=f"the event files are: {some}"
            )
    return names


def marks_at(place: Place, checkpoint: Checkpoint | None, samples: int | None) -> Marks:
    """The counters of the step that a log has there, with the numbers that it has itself."""
    marks = marks_of(checkpoint, place.step, samples)
    return replace(marks, iteration=place.last, clocks=place.clocks)


def marks_of(checkpoint: Checkpoint | None, step: int, samples: int | None) -> Marks:
    """The counters of `step`: the checkpoint's own, or what the user says of another step."""
    from ckptsurgeon.logs.marks import Marks

    if checkpoint is None or step != checkpoint.state().step:
        return Marks(iteration=step, samples=samples)
    state = checkpoint.state()
    return Marks(
        iteration=state.step,
        samples=state.promise.consumed_samples,
        tokens=state.tokens,
        gigaflos=state.gigaflos,
        saved_at=state.saved_at,
    )


# --- commands ------------------------------------------------------------------------------------


def refuse_both(section: TensorBoard) -> None:
    """Refuse --keep-tb NAME beside --no-keep-tb."""
    if section.keep_as is not None and not section.keep:
        raise UsageError("--keep-tb and --no-keep-tb exclude each other", next="give one of them")


def truncate_tb_events(
    after: Annotated[
        int, typer.Option("--after", metavar="STEP", help="The last iteration to keep.")
    ],
    section: Annotated[TensorBoard, "keep_as", "keep", "branch", "order", "samples", "salvage"],
    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="TAG=AXIS",
            help="The unit of TAG: iteration, samples, tokens, gigaflos.",
        ),
    ] = None,
) -> Recipe:
    """Cut TensorBoard events after an iteration.

    Tags on other axes (samples, tokens, gigaflos) are cut at the same moment of training. Works on
    a bare log directory too: --tb DIR.

    Examples:
    ckptsurgeon truncate-tb-events --after 6 --keep-tb before-the-spike
    ckptsurgeon truncate-tb-events --after 6 --tb tensorboard --yes
    """
    refuse_both(section)
    axes = dict(_pair(text) for text in axis or ())
    return Recipe(replace(section, after=after, axes=axes))


def rename_tb_events(
    tags: Annotated[
        list[str] | None,
        typer.Argument(metavar="OLD NEW …", help="Pairs of a tag and its new name."),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A YAML file of `old tag: new tag`, or a recipe.",
        ),
    ] = None,
    *,
    section: Annotated[TensorBoard, "regex", "allow_merge"],
) -> Recipe:
    """Rename TensorBoard tags.

    All pairs take one pass over each file. Works on a bare log directory too: --tb DIR.

    Examples:
    ckptsurgeon rename-tb-events 'lm loss' 'lm-loss-training/lm loss'
    """
    pairs = name_pairs(tags, mapping, "tensorboard", "rename-tb-events")
    return Recipe(replace(section, rename=pairs))


def name_pairs(
    names: Sequence[str] | None, mapping: Path | None, key: str, by: str
) -> dict[str, str]:
    """Old → new name, as the command `by` was given them: as words, or in a file that is a map or a
    recipe with a section `key`. Raises UsageError for neither, and for half a pair."""
    if mapping is not None and not names:
        pairs = plain_yaml.read(mapping)
        inner = pairs.get(key)
        return dict(inner.get("rename", {})) if isinstance(inner, Mapping) else dict(pairs)
    if mapping is None and names and len(names) % 2 == 0:
        return dict(zip(names[::2], names[1::2], strict=True))
    what = "no tag to rename was given: OLD NEW, or --map FILE"
    if names:
        what = "the tags to rename are given as OLD NEW or --map FILE, not both"
    if names and mapping is None:
        what = f"{names[-1]!r} has no new name: tags are given as OLD NEW or --map FILE"
    raise UsageError(what, next=command(by, "lm loss", "lm-loss-training/lm loss"))


def _pair(text: str) -> tuple[str, str]:
    tag, equals, axis = text.rpartition("=")
    if not equals:
        raise UsageError(f"--axis {text!r} is not TAG=AXIS", next="--axis 'my loss=samples'")
    return tag, axis


COMMANDS = {"truncate-tb-events": truncate_tb_events, "rename-tb-events": rename_tb_events}
