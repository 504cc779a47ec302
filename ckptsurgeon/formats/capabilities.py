"""What only some families can do with a checkpoint. A caller asks for it by its type."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.skipped import Range
from ckptsurgeon.formats.fields.values import (
    Blob,
    Conversion,
    Decay,
    Part,
    Place,
    Replica,
    Setting,
    Strip,
    Weight,
)
from ckptsurgeon.formats.heads.heads import Attention
from ckptsurgeon.hints import Hint, command

Kind = TypeVar("Kind", bound="Capability")


class Capability:
    """One thing that a family may be able to do. `unsaid` is what a checkpoint without it does not
    say, and `instead` what a user does then."""

    unsaid: ClassVar[str] = ""
    instead: ClassVar[Hint] = ""

    @classmethod
    def optional(cls: type[Kind], checkpoint: Checkpoint) -> Kind | None:
        """The checkpoint as one that can do it; None where it can't."""
        able: object = checkpoint
        return able if isinstance(able, cls) and cls not in checkpoint.unable else None

    @classmethod
    def of(cls: type[Kind], checkpoint: Checkpoint) -> Kind:
        """The checkpoint as one that can do it. Raises SurgeryError where it can't."""
        able = cls.optional(checkpoint)
        if able is None:
            raise cls.lacking(checkpoint)
        return able

    @classmethod
    def lacking(cls, checkpoint: Checkpoint) -> SurgeryError:
        """The refusal of what a checkpoint can't do, by its format or by what is in it."""
        return SurgeryError(f"{checkpoint.path.name} does not say {cls.unsaid}", next=cls.instead)


# --- what a caller refuses to go on without ------------------------------------------------------


class Cools(Capability, ABC):
    """Its schedule can be made to decay from the next step on."""

    unsaid = "what makes its rate decay"
    instead: ClassVar[Hint] = "set the schedule where the trainer makes it"

    @abstractmethod
    def cooldown(self, decay: Decay) -> tuple[list[Setting], list[str]]:
        """What to write so that the rate decays from the next step on, and what to warn of.

        Raises SurgeryError where the saved scheduler can't hold it, with the exact options that
        make the trainer's own do it."""


class NamesGroups(Capability, ABC):
    """Its param groups hold the names of their parameters."""

    unsaid = "which parameters its param groups hold"
    instead: ClassVar[Hint] = command(
        "show", why="what it keeps; without --params, all groups are set"
    )

    @abstractmethod
    def of_parameters(self, key: str) -> list[tuple[tuple[str, ...], Place]]:
        """Every place of `key` in the param groups, with the names of the group's parameters."""

    def of_group(self, key: str, place: Place, value: Any) -> list[Setting]:
        """What to write so that the group of `place` has `value` of `key`, at every step. Raises
        SurgeryError where its trainer sets the value anew, by what is kept for all groups."""
        return [Setting(key, place, value)]


class NamesMoments(Capability, ABC):
    """It says whose the elements of its moments are."""

    unsaid = "which parameter an element of its moments belongs to"
    instead: ClassVar[Hint] = command("reset", "moments", why="of all parameters")

    @abstractmethod
    def fragments(self, name: str) -> list[Part]:
        """`parts` of the moment `name`, and of its copies: a tensor in chunks is one of them."""


class HasWeights(Capability, ABC):
    """Its weights can be joined over all ranks."""

    unsaid = "how its weights are cut into shards"
    instead: ClassVar[Hint] = "use the trainer's own conversion tool"

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """Every weight of the model, consolidated over all ranks, one at a time. Raises
        SurgeryError where this checkpoint does not say how to join them."""


class HasReplicas(Capability, ABC):
    """It says what its tensor-parallel ranks keep whole."""

    unsaid = "which of its parameters are whole on every rank"
    instead: ClassVar[Hint] = command("verify", why="what can be checked here")

    @abstractmethod
    def replicas(self) -> list[Replica]:
        """Parameters that several tensor-parallel ranks keep whole, if any."""


class HasHeads(Capability, ABC):
    """It says how many heads its attention has."""

    unsaid = "how many attention heads its model has"
    instead: ClassVar[Hint] = command(
        "scale", "REGEX", "--by", "F", why="whole parameters, by a factor of your own"
    )

    @abstractmethod
    def attention(self) -> tuple[list[Attention], list[str]]:
        """Where the queries and keys of each layer's heads are, and why those of other layers are
        not known, a sentence each. Raises SurgeryError where the checkpoint does not say how many
        heads there are, or cuts them in a way that is not known."""


class Converts(Capability, ABC):
    """It can be made a step of another precision."""

    unsaid = "what a trainer in another precision loads of it"
    instead: ClassVar[Hint] = (
        "set the precision where the trainer is started, and compare its first losses"
    )

    @abstractmethod
    def conversion(self, to: str) -> Conversion:
        """What makes a trainer of the precision `to` (bf16, fp32) load this step, beside weights
        that are rounded from its masters. Raises SurgeryError where the format can't hold it."""


# --- what a caller goes on without ---------------------------------------------------------------


class Rebatches(Capability, ABC):
    """It keeps the batch size. Others take it from the trainer's command line or config."""

    @abstractmethod
    def rebatch(
        self, size: int | None, ramp: Sequence[int] | None, own_config: bool
    ) -> tuple[list[Setting], list[str]]:
        """What to write so that the next batch has `size` samples and the ramp-up is `ramp` (start,
        increment, samples; empty for none), with the counts of steps that must follow, and what to
        warn of; nothing where it is kept nowhere. `own_config` is whether a config in the run
        follows it, so that no flags need to."""


class Ranks(Capability, ABC):
    """It names other steps: the best one, those to keep. Others look at what is in the run."""

    @abstractmethod
    def forget(
        self, gone: Collection[Path], resumed: Sequence[Path]
    ) -> tuple[list[Setting], list[str]]:
        """What to write so that the trainer's own clean-up, and its choice of the best step, count
        on no step that is not in the run once `gone` has left it and `resumed` are what a restart
        loads; and what to warn of."""


class AdjustsGroups(Capability, ABC):
    """Its trainer makes the values of the param groups from one. Others give each group the same,
    or take it from the groups."""

    @abstractmethod
    def in_group(self, key: str, place: Place, value: Any) -> Any:
        """What `value` of `key`, given for all param groups, becomes in the one of `place`."""

    def multiplied(self) -> bool:
        """Whether a multiplier in each group says how much it gets of the one weight decay: a 0 is
        then no mark of a group that does not decay."""
        return False


class SkipsByFlag(Capability, ABC):
    """It keeps the command line with which its trainer passes over iterations, and decides none."""

    @abstractmethod
    def with_skipped(self, ranges: Sequence[Range], step: int) -> list[Range]:
        """`ranges` of iterations, and what the saved command line passes over after `step`: the
        flag that has them takes its place. As `advise_skip` of the format takes them."""


class SetsAnew(Capability, ABC):
    """Its trainer makes some settings of the param groups itself, whatever a checkpoint holds."""

    @abstractmethod
    def set_anew(self, key: str, value: str) -> str:
        """What a user does in the trainer for `value` of such a setting; "" for any other one."""

    @abstractmethod
    def anew_in(self, key: str, places: Sequence[Place]) -> tuple[str, list[int]] | None:
        """What the param groups have, in words, in which alone it makes `key` itself, and the
        numbers of those that `places` are in; None where it does so in all."""

    @classmethod
    def refuse(
        cls, checkpoint: Checkpoint, key: str, value: float, places: Sequence[Place] = ()
    ) -> None:
        """Raise SurgeryError where the trainer makes `key` itself: in all param groups, or in one
        that a place of `places` is in."""
        own = cls.optional(checkpoint)
        if own is None or not (advice := own.set_anew(key, f"{value:g}")):
            return
        which = ""
        hints: list[Hint] = [advice]
        if (some := own.anew_in(key, places)) is not None:
            words, groups = some
            if not groups:
                return
            which = f" of param {'group' if len(groups) == 1 else 'groups'} "
            which += f"{', '.join(map(str, groups))} ({words})"
            hints.append(_of_the_others(checkpoint, key, value))
        raise SurgeryError(
            f"the checkpoint does not decide {key}{which}: its trainer makes it anew at each start",
            next=hints,
        )


def _of_the_others(checkpoint: Checkpoint, key: str, value: float) -> Hint:
    """How the groups get `value` whose `key` the checkpoint decides."""
    with contextlib.suppress(SurgeryError):  # of one that does not name its parameters
        if NamesGroups.of(checkpoint).of_parameters(key):
            only = ("--params", "REGEX")
            return command("set", f"{key}={value:g}", *only, why="of the other groups")
    return (
        f"the other groups keep the checkpoint's {key}, and nothing in it names them: set it in "
        "param_groups in the trainer's code, once the checkpoint is loaded"
    )


class CountsMore(Capability, ABC):
    """It keeps numbers that no recipe sets, and that are those of another step in another one."""

    @abstractmethod
    def further_counters(self) -> list[tuple[str, Place]]:
        """Every place of each, with its name."""


class NumbersByRank(Capability, ABC):
    """The optimizer of a rank numbers what that rank has. In others a number stands for one
    parameter."""

    @abstractmethod
    def names_in(self, file: Path, order: Sequence[str]) -> list[str]:
        """The names of what the optimizer in `file` numbers, of those in the order of all."""


class HasMoreWeights(Capability, ABC):
    """It has weights that are none of `parts`: which no update reaches, or for other readers."""

    @abstractmethod
    def all_parts(self) -> list[Part]:
        """`parts`, and those of all other weights: all of them become new in another model's."""


class HasForms(Capability, ABC):
    """It may hold a converted copy of itself. Others save a step in one form."""

    @abstractmethod
    def like(self, other: Checkpoint) -> Checkpoint:
        """This checkpoint without its converted copy, or with that alone, where `other` has no
        more. Raises SurgeryError where `other` has one, and this has none."""


class Repeats(Capability, ABC):
    """Some of its files repeat others."""

    @abstractmethod
    def copies(self) -> Mapping[Path, Path]:
        """Each file that repeats a shard of the step, which a restart may load in its place → that
        shard: both get the same new tensors. `parts` are of the shards alone."""


class HasArchives(Capability, ABC):
    """Its files have archives inside. Of others, each shard is one."""

    @abstractmethod
    def blobs(self) -> Iterable[Blob]:
        """The archives that lie inside larger files, each once."""


class HasPadding(Capability, ABC):
    """Some of its flat tensors end with padding, which is saved as memory had it."""

    @abstractmethod
    def unpadded(self, strip: Strip) -> Strip | None:
        """The strip without padding; None where it is not known how much of it there is."""


class BoundToRanks(Capability, ABC):
    """Its trainer may load it on the sizes alone that saved it. Others load on any."""

    @abstractmethod
    def loads_on(self) -> Mapping[str, int]:
        """Those sizes: `ranks` in all, of tensors `tp`, of stages `pp`. Without one where others
        load as well, or where that is not known."""


class ComputesRates(Capability, ABC):
    """Its trainer computes the rates anew when it loads, by a config that the step may have."""

    @abstractmethod
    def rate_after_loading(self, k: int) -> float | None:
        """Of the k-th update after a load; None where no config says it."""


class HasDigests(Capability, ABC):
    """Its trainer saved digests of its files."""

    @abstractmethod
    def digests(self) -> Mapping[Path, str]:
        """The sha256 that the trainer saved for a file, in hexadecimal."""


def alike(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The checkpoint in the form that `other` has; see `HasForms`."""
    able = HasForms.optional(checkpoint)
    return checkpoint if able is None else able.like(other)


def copies(checkpoint: Checkpoint) -> Mapping[Path, Path]:
    """Each file that repeats a shard → that shard; see `Repeats`."""
    able = Repeats.optional(checkpoint)
    return {} if able is None else able.copies()


def blobs(checkpoint: Checkpoint) -> Iterable[Blob]:
    """The archives inside its files; see `HasArchives`."""
    able = HasArchives.optional(checkpoint)
    return () if able is None else able.blobs()


def digests(checkpoint: Checkpoint) -> Mapping[Path, str]:
    """What the trainer saved of its files; see `HasDigests`."""
    able = HasDigests.optional(checkpoint)
    return {} if able is None else able.digests()


def names_in(checkpoint: Checkpoint, file: Path, order: Sequence[str]) -> Sequence[str]:
    """The names of what the optimizer in `file` numbers; see `NumbersByRank`."""
    able = NumbersByRank.optional(checkpoint)
    return order if able is None else able.names_in(file, order)
