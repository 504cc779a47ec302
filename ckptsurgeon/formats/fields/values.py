"""The values that a Format and its Checkpoint answer in: places, weights, settings, state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptsurgeon.errors import NotUnderstood
from ckptsurgeon.hints import Hint
from ckptsurgeon.plans.edits import ZEROS, Fill, Key
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.promise import Promise

Located = tuple[Path, tuple[Key, ...]]
"""A file, and a key path in it."""


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, by torch's names; parts, strips and places are named so in every format."""
NUMBER = "parameter "
"""What a parameter is called that has no name, before its number."""
COUNTING = ("int64", "int32", "int16", "bool")
"""Dtypes of what counts or masks beside the weights: no gradient reaches it, and it stays."""
UNSET = "_float_tensor"
"""A buffer of fairseq's and metaseq's modules, for its dtype and device: nobody set its number."""


class Place(NamedTuple):
    """One place where a checkpoint keeps a field.

    `path` is the key path inside the pickle of `file`. `wins` is true when the trainer's value at
    step N + 1 comes from here, and false for a copy that is overwritten or never read. `zero` is
    what a tensor becomes to hold zeros: a code where its elements are quantized. `chunks` counts
    those that it was saved in (`Checkpoint.pieces`)."""

    file: Path
    path: tuple[Key, ...]
    value: Any
    wins: bool = True
    zero: str | Fill = ZEROS
    chunks: int = 1


class Box(NamedTuple):
    """The block of a parameter of the shape `whole` that one cut holds, row after row: `size`
    elements along each axis, from `offset` on. `replica` is whether other cuts hold the same."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    replica: bool = False

    @classmethod
    def all(cls, size: tuple[int, ...], replica: bool = False) -> Box:
        """That of a cut which has the whole parameter."""
        return cls(size, (0,) * len(size), size, replica)

    @property
    def numel(self) -> int:
        """The elements of the cut."""
        return prod(self.size)


class Part(NamedTuple):
    """A stretch of one parameter: the elements [start, end) of the tensor at `place` are those from
    `first` on of its `kind` (weights, master, exp_avg, exp_avg_sq). `cut` tells apart what several
    ranks each hold a piece or a copy of, and `box` says which block of the parameter that is; None
    where it is not known."""

    parameter: str
    cut: str
    kind: str
    place: Place
    start: int
    end: int
    first: int
    box: Box | None = None

    @classmethod
    def whole(
        cls, parameter: str, cut: str, kind: str, place: Place, box: Box | None = None
    ) -> Part:
        """All elements of the tensor at `place`, which are all of that cut."""
        return cls(parameter, cut, kind, place, 0, place.value.numel, 0, box)


class Weight(NamedTuple):
    """One weight of the model: its bytes are those of `spans` (file, start, end), in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spans: tuple[tuple[Path, int, int], ...]


class Blob(NamedTuple):
    """A torch archive inside a larger file: `length` bytes from `start` on. `kind` is exp_avg or
    exp_avg_sq when its one tensor is of a moment, and None when it may be padding, which trainers
    save as they find it in memory."""

    file: Path
    start: int
    length: int
    kind: str | None = ""


class Copy(NamedTuple):
    """One rank's copy of a replicated parameter: a tensor, or `elements` [start, end) of it."""

    place: Place
    elements: tuple[int, int] | None


class Replica(NamedTuple):
    """The copies of one parameter's weights, master, exp_avg or exp_avg_sq (`kind`) that should be
    equal."""

    parameter: str
    kind: str
    copies: tuple[Copy, ...]


class Codes(NamedTuple):
    """Elements of one byte each: an index into the numbers at `book`, times the number at `scale`
    of their block, as bitsandbytes keeps moments."""

    place: Place
    scale: Place
    book: Place

    @property
    def block(self) -> int:
        """How many elements one scale is of: a power of two, of which the last block may lack some;
        all elements where there is one scale."""
        least: int = -(-self.place.value.numel // max(1, self.scale.value.numel))
        return 1 << max(0, least - 1).bit_length()


class Adam(NamedTuple):
    """What the moments of a strip were made with: the updates that its optimizer counted, betas,
    eps and lr of its param group; None where they are not kept. `lawful` is whether the optimizer
    is known to keep plain means of the gradient and its square."""

    step: float | None
    betas: tuple[float, ...] | None
    eps: float | None
    lr: float | None
    lawful: bool


class Strip(NamedTuple):
    """The same `numel` elements of a parameter in everything that is kept of them, side by side.

    `tensors` has by kind (exp_avg, exp_avg_sq, master, weights) the place of a tensor whose
    elements lie in order, and the first one that is theirs; `codes` has those that are quantized.
    `shape` is of the whole parameter where it is known and all of it is here."""

    parameter: str
    numel: int
    tensors: Mapping[str, tuple[Place, int]]
    adam: Adam | None = None
    codes: Mapping[str, Codes] = MappingProxyType({})
    shape: tuple[int, ...] | None = None


class StateDict(NamedTuple):
    """What one optimizer saved: the places of each key of its states, and of each key of its param
    groups. `whole` are the states themselves where the trainer loads an optimizer without them, as
    torch does; `beside` is what the saved dict has that is neither."""

    file: Path
    state: Mapping[str, Sequence[Place]]
    group: Mapping[str, Sequence[Place]]
    whole: tuple[Place, ...] = ()
    beside: Mapping[str, Place] = MappingProxyType({})


class Setting(NamedTuple):
    """A new value for one place; `field` is what a plan calls it."""

    field: str
    place: Place
    value: Any


class Conversion(NamedTuple):
    """What a step of another precision is, beside its weights of `dtype`: `settings`, new `names`
    of files, keys of the `config` in the run that its trainer takes the precision from, and the
    words of another `launch`; empty where none is needed."""

    dtype: str
    settings: tuple[Setting, ...]
    names: Mapping[Path, str]
    config: Mapping[str, str]
    launch: str


class Decay(NamedTuple):
    """A cooldown: the rate goes from what the next step would use to `to` in `steps` updates along
    `shape` (linear, 1-sqrt, cosine). `samples` is how many these take, where that is known."""

    steps: int
    samples: int | None
    shape: str
    to: float


class Hazard(NamedTuple):
    """What is wrong with a run although its files are sound, and the launch that helps."""

    what: str
    next: Hint


LOADED = "the trainer loads it in place of step {}"
HIGHEST = "a restart that takes the highest number loads it in place of step {}"
OUTLIVES = "the trainer's clean-up keeps it and removes what is saved after step {}"
"""The harm of a checkpoint with a later number: the second where it is not known what a restart
takes, the third of one that is never loaded."""


class Rival(NamedTuple):
    """A checkpoint outside the run's own steps that the trainer would load in place of one of them,
    or keep when it cleans up: its step, `what` it is and the `harm` to step `{}`. A surgery moves
    `paths` aside; where there are none it lies outside the run, and `remedy` is what to do by
    hand."""

    step: int
    what: str
    paths: tuple[Path, ...]
    remedy: Hint = ""
    harm: str = LOADED


@frozen
class State:
    """One checkpoint as its trainer would see it: no tensor bytes.

    `schedule` has Megatron's AnnealingLR keys (steps are samples) or None. Of another family,
    `scheduler` says it in words, and `peak_lr` is what `lr` of a recipe sets and scales. `tokens`,
    `gigaflos` and `saved_at` (Unix time of the newest file) are what event files are matched with;
    `batch_size`, `rampup` (start, increment, samples) and `sizes` (the sample from which each
    holds, and a batch size) give the samples of an iteration. `data` says why the consumed samples
    do not decide which data comes next, where they do not."""

    step: int
    promise: Promise
    schedule: Mapping[str, Any] | None
    dialect: str
    data_parallel: int
    model_parallel: int
    dynamic_loss_scale: bool
    tokens: int | None
    gigaflos: float | None
    saved_at: float
    notes: tuple[str, ...] = ()
    batch_size: int | None = None
    rampup: tuple[int, int, int] | None = None
    peak_lr: float | None = None
    scheduler: str = ""
    sizes: tuple[tuple[int, int], ...] = ()
    data: str = ""

    def needed(self, *fields: str) -> Promise:
        """The promise, for who can't do without these `fields` of the checkpoint. Raises
        NotUnderstood where one of them is not understood."""
        for name in ("state", *fields):
            if name in self.promise.not_understood:
                raise NotUnderstood(self.promise.not_understood[name])
        return self.promise
