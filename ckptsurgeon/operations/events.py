"""The log part of a surgery: every event folder of the run is cut, or its tags renamed.

What reads and writes event files is imported where it is used: most surgeries touch none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from ckptsurgeon.errors import UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.hints import command
from ckptsurgeon.operations.section import Changes, Recipe, Section, given, unknown_value
from ckptsurgeon.plans.edits import AnyChange
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import next_id, standing

if TYPE_CHECKING:
    from ckptsurgeon.logs.marks import Marks
    from ckptsurgeon.logs.rename import Counts

ORDERS = ("wall", "mtime", "name")
AXES = ("iteration", "samples", "tokens", "gigaflos")


@dataclass(frozen=True)
class TensorBoard(Section):
    """`truncate` cuts event files at the rollback step (or `after`) by lineage; the cut branch is
    kept as a run of its own named `keep_as` unless `keep` is false; `rename` maps old tag to new.

    `branch`, `order`, `axes` and `samples` (consumed at `after`) decide what the logs can't prove
    (logs/lineage.py); `salvage` drops damaged records; `note` writes the surgery into the
    logs."""

    key: ClassVar[str] = "tensorboard"
    standing: ClassVar[bool] = True
    on_logs: ClassVar[bool] = True

    truncate: bool = True
    after: int | None = None
    keep: bool = True
    keep_as: str | None = None
    rename: dict[str, str] = field(default_factory=dict)
    regex: bool = False
    allow_merge: bool = False
    branch: list[str] = field(default_factory=list)
    order: str | None = None
    axes: dict[str, str] = field(default_factory=dict)
    samples: int | None = None
    salvage: bool = False
    note: bool = True

    def check(self, recipe: Recipe) -> None:
        if self.order is not None and self.order not in ORDERS:
            raise unknown_value(self.order, ORDERS, "tensorboard.order")
        for tag, axis in self.axes.items():
            if axis not in AXES:
                raise unknown_value(axis, AXES, f"tensorboard.axes.{tag}")
        for key, value in (("after", self.after), ("samples", self.samples)):
            if value is not None and value < 0:
                raise UsageError(f"`tensorboard.{key}` is {value}", next=f"{key} is never below 0")

    def title(self, run: Run, step: int) -> list[str]:
        parts = [] if self.after is None else [f"cut events after {self.after}"]
        if self.rename and self.regex:
            parts.append(f"rename tags like {', '.join(self.rename)}")
        elif self.rename:
            parts.append(f"rename {len(self.rename)} tag{'s' if len(self.rename) > 1 else ''}")
        return parts

    def changes(self, run: Run, recipe: Recipe, checkpoint: Checkpoint) -> Changes:
        """A cut at the rollback step (or `after`), or a rename. The checkpoint's own counters and
        save time say which branch is meant."""
        back = recipe.leaves_newer and self.truncate
        cut_at = checkpoint.step if self.after is None and back else self.after
        return _cut_or_rename(run, self, cut_at, checkpoint)

    def log_changes(self, run: Run, recipe: Recipe) -> Changes:
        """The same without a checkpoint: the logs alone say which branch is meant."""
        return _cut_or_rename(run, self, self.after, None)

    def record(self, run: Run, recipe: Recipe, step: int | None, title: str) -> list[AnyChange]:
        """The surgery as a text in the run's first log folder, unless the recipe says no; not
        behind a cut that it makes, where the same cut would find it."""
        folders = run.logs.folders()
        steps = [at for at in (step, self.after) if at is not None]
        if not self.note or not folders or not steps:
            return []
        from ckptsurgeon.logs import note

        text = f"**{title}**" + (f"\n\n{recipe.why}" if recipe.why else "")
        return [note.note(folders[0], run.root, min(steps), text, time.time())]


def _cut_or_rename(
    run: Run, section: TensorBoard, cut_at: int | None, checkpoint: Checkpoint | None
) -> Changes:
    changes: list[AnyChange] = []
    warnings: list[str] = []
    counts: list[Counts] = []
    if cut_at is not None and section.rename:
        raise UsageError(
            "one recipe can't both cut event files and rename their tags",
            next="do the rollback first, then the rename in a surgery of its own",
        )
    if cut_at is not None or section.rename:
        warnings += [
            f"{link}/ is a link, so its event files stay as they are; name it in "
            f"ckptsurgeon.yaml if they are this run's: tensorboard: [{link}]"
            for link in run.logs.links()
        ]
    branch = _branch(run, section.branch)
    if section.rename:
        from ckptsurgeon.logs import rename
    for folder in run.logs.folders():
        if cut_at is not None:
            from ckptsurgeon.logs import cut

            keep = (section.keep_as or f"cut-{next_id(run.root)}") if section.keep else None
            file_changes, sentences = cut.truncate(
                folder,
                run.root,
                _marks(checkpoint, cut_at, section.samples),
                keep_as=keep,
                salvage=section.salvage,
                branch=branch,
                order=section.order,
                axes=section.axes,
            )
        elif section.rename:
            file_changes, found = rename.rename(
                folder,
                run.root,
                section.rename,
                regex=section.regex,
                allow_merge=section.allow_merge,
            )
            counts.append(found)
            sentences = []
        else:
            break
        changes += file_changes
        warnings += sentences
    if counts:
        warnings += _renamed(run, section, counts)
    return changes, warnings


def _renamed(run: Run, section: TensorBoard, counts: Sequence[Counts]) -> list[str]:
    """What to know of a rename. Raises UsageError when no event has such a tag, nor had one before
    the same rename was done."""
    from ckptsurgeon.logs import rename

    done = any(
        receipt.recipe.get("tensorboard", {}).get("rename") == section.rename
        for receipt in standing(run.receipts())
    )
    everywhere = rename.merged(counts)
    if not done:
        bare = ["--tb", run.root] if run.bare else []
        rename.refuse_nowhere(everywhere, section.rename, bare, regex=section.regex)
    told = [text for each in counts for text in replace(each, unmatched=()).sentences()]
    return [*dict.fromkeys(told), *replace(everywhere, events={}, patterns=()).sentences()]


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


def _marks(checkpoint: Checkpoint | None, step: int, samples: int | None) -> Marks:
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

KeepTB = Annotated[
    str | None,
    typer.Option(
        "--keep-tb", metavar="NAME", help="Keep the cut events as a TensorBoard run called NAME."
    ),
]
NoKeepTB = Annotated[
    bool, typer.Option("--no-keep-tb", help="Do not keep the cut events as a run of their own.")
]


def cut_branch(name: str | None, nothing: bool) -> dict[str, Any]:
    """What --keep-tb and --no-keep-tb say of the cut branch."""
    if name is not None and nothing:
        raise UsageError("--keep-tb and --no-keep-tb exclude each other", next="give one of them")
    return {"keep": False} if nothing else given(keep_as=name)


def truncate_tb_events(
    after: Annotated[
        int, typer.Option("--after", metavar="STEP", help="The last iteration to keep.")
    ],
    keep_tb: KeepTB = None,
    no_keep_tb: NoKeepTB = False,
    branch: Annotated[
        list[str] | None,
        typer.Option("--branch", metavar="FILE", help="An event file of the branch to keep."),
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="TAG=AXIS",
            help="The unit of TAG: iteration, samples, tokens, gigaflos.",
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", metavar="BY", help="Order files by wall, mtime or name."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", metavar="N", help="Samples consumed at STEP, if the logs do not say."
        ),
    ] = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Drop damaged records instead of refusing.")
    ] = False,
) -> dict[str, Any]:
    """Cut TensorBoard events after an iteration.

    Tags on other axes (samples, tokens, gigaflos) are cut at the same moment of training. Works on
    a bare log directory too: --tb DIR.

    Examples:
    ckptsurgeon truncate-tb-events --after 6 --keep-tb before-the-spike
    ckptsurgeon truncate-tb-events --after 6 --tb tensorboard --yes
    """
    section = given(
        after=after,
        branch=branch or None,
        axes=dict(_pair(text) for text in axis) if axis else None,
        order=order,
        samples=samples,
        salvage=salvage or None,
    )
    return {"tensorboard": {**section, **cut_branch(keep_tb, no_keep_tb)}}


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
    regex: Annotated[bool, typer.Option("--regex", help="OLD is a regular expression.")] = False,
    allow_merge: Annotated[
        bool, typer.Option("--allow-merge", help="Allow NEW to be an existing tag.")
    ] = False,
) -> dict[str, Any]:
    """Rename TensorBoard tags.

    All pairs take one pass over each file. Works on a bare log directory too: --tb DIR.

    Examples:
    ckptsurgeon rename-tb-events 'lm loss' 'lm-loss-training/lm loss'
    """
    if mapping is not None and not tags:
        pairs = plain_yaml.read(mapping)
        section = pairs.get("tensorboard")
        if isinstance(section, Mapping):
            pairs = section.get("rename", {})
    elif mapping is None and tags and len(tags) % 2 == 0:
        pairs = dict(zip(tags[::2], tags[1::2], strict=True))
    else:
        what = "no tag to rename was given: OLD NEW, or --map FILE"
        if tags:
            what = "the tags to rename are given as OLD NEW or --map FILE, not both"
        if tags and mapping is None:
            what = f"{tags[-1]!r} has no new name: tags are given as OLD NEW or --map FILE"
        raise UsageError(
            what,
            next=command("rename-tb-events", "lm loss", "lm-loss-training/lm loss"),
        )
    return {"tensorboard": {"rename": pairs, "regex": regex, "allow_merge": allow_merge}}


def _pair(text: str) -> tuple[str, str]:
    tag, equals, axis = text.rpartition("=")
    if not equals:
        raise UsageError(f"--axis {text!r} is not TAG=AXIS", next="--axis 'my loss=samples'")
    return tag, axis


SECTIONS = (TensorBoard,)
COMMANDS = {"truncate-tb-events": truncate_tb_events, "rename-tb-events": rename_tb_events}
