"""The protocols of a Format and its Checkpoint; `values` has what they answer in.

`layout.BaseFormat` and `checkpoint.BaseCheckpoint` do what most families have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckptsurgeon.edits import AnyChange, Append, Change, Content, Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.formats.columns import Column
from ckptsurgeon.formats.heads import Attention
from ckptsurgeon.formats.values import (
    Blob,
    Conversion,
    Decay,
    Fragment,
    Hazard,
    Part,
    Place,
    Replica,
    Rival,
    Setting,
    State,
    StateDict,
    Strip,
    Weight,
)


class Checkpoint(Protocol):
    """One saved step, its shards' trees read once."""

    path: Path
    step: int
    trees: dict[Path, Any]
    archives: dict[Path, Archive]

    @property
    def numbered(self) -> bool:
        """Whether the number of the step counts updates, as the trainer saved it."""
        ...

    def contradictions(self) -> list[str]:
        """What can't be true together in the shards, a sentence each."""
        ...

    def state(self) -> State:
        """What is in the checkpoint. Raises SurgeryError when its shards disagree."""
        ...

    def locate(self, field: str) -> Sequence[Place]:
        """Every place that `field`, one of `fields.FIELDS`, is kept in, in every shard; an empty
        list when it is kept nowhere. Raises DamagedFile for a value that it can't have."""
        ...

    def settings(self, key: str) -> list[Place]:
        """Every place of `key` in the param groups."""
        ...

    def group_of(self, place: Place) -> int:
        """The number of the param group that a place of one of its keys is in."""
        ...

    def beside(self, place: Place, key: str) -> tuple[Key, ...]:
        """The path of another key in the param group of `place`."""
        ...

    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """What `value` of `key`, given for all param groups, becomes in the one of `place`: the
        value itself, but where the trainer makes the groups' values from one."""
        ...

    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """Every place of `key` in the param groups, with the names of the group's parameters.
        Raises SurgeryError where the format does not say which those are."""
        ...

    def state_dicts(self) -> list[StateDict]:
        """What each optimizer saved, by key; none where the checkpoint holds no optimizer."""
        ...

    def value(self, file: Path, path: tuple[Key, ...]) -> Any:
        """The value under `path` in `file`; None when it is not there."""
        ...

    def is_zero(self, place: Place, elements: tuple[int, int] | None = None) -> bool:
        """Whether the tensor in `place` is known to be all zeros without reading its bytes; of
        `elements` [start, end), whether they are zeros by their bytes."""
        ...

    def are_zero(self, column: Column) -> list[bool]:
        """Of each place what `is_zero` says, sooner for many."""
        ...

    def fragments(self, name: str) -> list[Fragment]:
        """Where the elements of each parameter are in the tensors of `name` (exp_avg,
        exp_avg_sq). Raises SurgeryError where the format does not say."""
        ...

    def pieces(self, place: Place) -> list[Place]:
        """The tensors that the one at `place` was saved in: itself, or its chunks, one by one."""
        ...

    def parts(self) -> list[Part]:
        """Every stretch of every parameter's weights, masters and moments that the trainer loads.
        Raises SurgeryError where the format does not say whose they are."""
        ...

    def like(self, other: Checkpoint) -> Checkpoint:
        """This checkpoint without a converted copy of itself, or with that alone, where `other` has
        no more. Raises SurgeryError where `other` has one, and this has none."""
        ...

    def copies(self) -> Mapping[Path, Path]:
        """Each file that repeats a shard of the step, which a restart may load in its place → that
        shard: both get the same new tensors. `parts` are of the shards alone."""
        ...

    def attention(self) -> tuple[list[Attention], list[str]]:
        """Where the queries and keys of each layer's heads are, and why those of other layers are
        not known, a sentence each. Raises SurgeryError where the checkpoint does not say how many
        heads there are, or cuts them in a way that is not known."""
        ...

    def span(self, place: Place, start: int, end: int) -> tuple[Path, int, int]:
        """Where the elements [start, end) of the tensor at `place` are: file, first byte, end.
        Raises SurgeryError for a tensor whose elements don't lie in the order of its shape."""
        ...

    def reschedule(self, values: Mapping[str, Any]) -> tuple[list[Setting], list[str]]:
        """What to write so that the schedule has `values` (recipe keys lr, min_lr, warmup, decay,
        decay_style) from the next step on, and what to warn of.

        Raises UsageError for a schedule that can't be, SurgeryError for one that is kept
        elsewhere, with the trainer's flag to use instead."""
        ...

    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """What to write so that the rate decays from the next step on, and what to warn of.

        Raises SurgeryError where the saved scheduler can't hold it, with the exact options that
        make the trainer's own do it."""
        ...

    def conversion(self, to: str) -> Conversion:
        """What makes a trainer of the precision `to` (bf16, fp32) load this step, beside weights
        that are rounded from its masters. Raises SurgeryError where the format can't hold it."""
        ...

    def rebatch(
        self, size: int | None, ramp: Sequence[int] | None, own_config: bool
    ) -> tuple[list[Setting], list[str]]:
        """What to write so that the next batch has `size` samples and the ramp-up is `ramp` (start,
        increment, samples; empty for none), with the counts of steps that must follow, and what to
        warn of; nothing where it is kept nowhere. `own_config` is whether a config in the run
        follows it, so that no flags need to."""
        ...

    def recount(self, counter: str, value: int) -> tuple[list[Setting], list[str]]:
        """What to write so that the counter `counter` of `fields.FIELDS` is `value`, with those
        that a load computes from it, and what to warn of; nothing where it is kept nowhere."""
        ...

    def forget(
        self, gone: Collection[Path], resumed: Sequence[Path]
    ) -> tuple[list[Setting], list[str]]:
        """What to write so that the trainer's own clean-up, and its choice of the best step, count
        on no step that is not in the run once `gone` has left it and `resumed` are what a restart
        loads; and what to warn of."""
        ...

    def rescale(self, scale: float) -> list[Setting]:
        """What to write so that the dynamic loss scale is `scale` from the next step on: the scale
        and the counters that its next growth is taken from; nothing where there is none."""
        ...

    def scaler_start(self) -> list[tuple[Place, Any]]:
        """Each place of the dynamic loss scaler with the value that it had in a new run."""
        ...

    def replicas(self) -> list[Replica]:
        """Parameters that several tensor-parallel ranks keep whole. Raises SurgeryError where there
        are none, or the format does not say."""
        ...

    def weights(self) -> Iterator[Weight]:
        """Every weight of the model, consolidated over all ranks, one at a time. Raises
        SurgeryError where the format, or this checkpoint, does not say how to join them."""
        ...

    def strips(self) -> Iterator[Strip]:
        """What is kept of each parameter, side by side: moments, and where the format says which
        weight they are of, master and weight. Whole tensors are named as well as the format can."""
        ...

    def holder(self, place: Place) -> Archive:
        """The archive that has the elements of the tensor at `place`."""
        ...

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """The new bytes of every file of the run at `root` that `changes` (file → its own) lead to;
        a file that is not there yet is a new one. Together they are one state of the checkpoint."""
        ...

    def compact(self, root: Path) -> list[tuple[str, Content, int]]:
        """For each shard with dead bytes: its name from `root`, its content without them, and how
        many they are."""
        ...

    def blobs(self) -> Iterator[Blob]:
        """The archives that lie inside larger files, each once; those of whole `.pt` files are not
        among them."""
        ...

    def digests(self) -> Mapping[Path, str]:
        """The sha256 that the trainer saved for a file, in hexadecimal."""
        ...

    def globals(self) -> Mapping[str, frozenset[str]]:
        """By shard, every `module.name` that its trainer would import to load it."""
        ...

    def rounded(self, changes: Iterable[AnyChange], root: Path) -> list[AnyChange]:
        """The same with each number as its place can hold it."""
        ...

    def after(self, changes: Sequence[AnyChange], root: Path) -> Checkpoint:
        """This checkpoint as it will be once `changes` are on disk; nothing is written."""
        ...


class Format(Protocol):
    """One family of trainers."""

    name: str

    def recognizes(self, run: Path) -> bool:
        """Whether the directory looks like the root of such a run."""
        ...

    def steps(self, run: Path) -> list[int]:
        """The saved steps, ascending, complete or not."""
        ...

    def directory(self, run: Path, step: int) -> Path:
        """The folder that step `step` is saved in."""
        ...

    def entries(self, run: Path, step: int) -> list[Path]:
        """The files or folders that are step `step` and nothing else: what leaves when it goes."""
        ...

    def files(self, run: Path, step: int) -> list[Path]:
        """Every file of step `step`, ascending: of its folders all, shards or not."""
        ...

    def missing(self, run: Path, step: int) -> list[str]:
        """The names of the shards that must exist for the step to load, and do not."""
        ...

    def nameless(self, run: Path) -> str:
        """Why a file that could be a step by its name is none, in a sentence; "" without such."""
        ...

    def strays(self, run: Path, step: int) -> list[str]:
        """A sentence for each name that belongs to no rank of this step."""
        ...

    def pointer_files(self, run: Path) -> list[Path]:
        """The files that say where the trainer resumes, there or not; none for a trainer that goes
        by the names of its steps."""
        ...

    def pointers(self, run: Path, step: int) -> Mapping[Path, str | Path]:
        """Each file that must change to make the run resume at `step`, with its whole text, or with
        the shard of `step` that it must be a copy of."""
        ...

    def pointed(self, pointer: Path) -> int | None:
        """The step that a pointer file names, or None when it is missing or names nothing."""
        ...

    def resumes(self, run: Path) -> int | None:
        """The step that a trainer without pointer files finds by its own rule, complete or not;
        None where it has such files, and where it takes the highest complete step."""
        ...

    def stale_pointers(self, run: Path, step: int) -> list[str]:
        """A sentence for each file that names another step still when `pointers` are written for
        `step`, with what to leave out of the relaunch."""
        ...

    def log_folders(self, run: Path) -> Sequence[str]:
        """Where event files are looked for, from the run, if its settings do not say."""
        ...

    def idle_paths(self, run: Path, step: int) -> list[str]:
        """Key paths of the page that describes the format which lead nowhere in this step."""
        ...

    def kept_as(self, file: str) -> str:
        """The path of `file` in an attic: there the trainer's own clean-up must not find it."""
        ...

    def rivals(self, run: Path, step: int) -> list[Rival]:
        """What the trainer would load in place of `step` although every pointer names that, or keep
        and remove newer ones for, by the command line that its checkpoints keep."""
        ...

    def hazards(self, run: Path) -> list[Hazard]:
        """What leads a relaunch astray although every file is sound."""
        ...

    def advise(self, key: str, value: object) -> str:
        """A sentence: what to do in this trainer so that it uses `value` for `key` (clip_grad,
        seed, optimizer), which its checkpoints do not decide."""
        ...

    def advise_setting(self, key: str) -> str:
        """A sentence: where the trainer takes `key` of the param groups from, which a checkpoint
        without them does not keep."""
        ...

    def advise_skip(self, ranges: Sequence[tuple[int, int]]) -> str:
        """A sentence: how this trainer is made to pass over ranges of iterations, ends included."""
        ...

    def advise_rewarm(
        self, state: State, kind: str, until: str, iterations: int
    ) -> tuple[str, ...]:
        """What to do in this trainer in place of a re-warm window of `kind` that is over after
        `iterations`, once `until` samples are consumed, a line for each step."""
        ...

    def launch_flags(self, run: Path, checkpoint: Checkpoint) -> list[str]:
        """The arguments with which its launcher goes on from `checkpoint` as it is; none where the
        trainer takes no values from its command line."""
        ...

    def open(self, run: Path, step: int, without: Collection[Path] = ()) -> Checkpoint:
        """Read the trees of every shard of one saved step, but for those in `without`."""
        ...


class Disagreement(SurgeryError):
    """Shards of one checkpoint hold different values of a field that must be the same in all."""
