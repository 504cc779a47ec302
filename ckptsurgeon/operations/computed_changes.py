"""Changes of tensors whose new numbers are computed from others when they are written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files import expressions
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.tree import Object, Tensor, class_of
from ckptsurgeon.formats import MOMENTS, Checkpoint, Part, Place
from ckptsurgeon.formats.capabilities import copies
from ckptsurgeon.formats.optimizers.roles import ROLES
from ckptsurgeon.formats.optimizers.table import STEPS, changing, recognise
from ckptsurgeon.formats.places.moments import NUMBERED
from ckptsurgeon.formats.tensors.second_copies import second_copies
from ckptsurgeon.formats.tensors.stretches import Kinds, Parameter
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.plans.edits import AnyChange, Change, Computed, Key, relative
from ckptsurgeon.plans.sources import Numbers, Source
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.arithmetic import ITEM


def source(run: Run, checkpoint: Checkpoint, place: Place, start: int, end: int) -> Source:
    """Elements of a tensor as a source, named from the run's root."""
    file, first, last = checkpoint.span(place, start, end)
    return Source(relative(file, run.root), first, last, place.value.dtype)


OWN = ("weights", "average of the weights", "what rounding left")
"""Roles of what an optimizer keeps of the weights: new weights alone would not last an update."""


def refuse_weightless(checkpoint: Checkpoint, parameters: Mapping[Parameter, Kinds]) -> None:
    """Raise SurgeryError where only moments are kept in what can be edited, or where the optimizer
    keeps weights of its own, of which it is not known whose they are."""
    if not any(kinds.keys() & {"weights", "master"} for kinds in parameters.values()):
        raise SurgeryError(
            f"the weights of {checkpoint.path.name} are in files that ckptsurgeon does not edit",
            next="graft, clip_moments and reset work on its moments",
        )
    if any("master" in kinds for kinds in parameters.values()):
        return
    for each in checkpoint.state_dicts():
        own = [key for key in each.state if ROLES.get(key) in OWN]
        if own:
            raise SurgeryError(
                f"{each.file.name}: the optimizer keeps {', '.join(own)} of each parameter, and "
                "would go on from those",
                next="graft, clip_moments and reset work on its moments",
            )


def refuse_other_states(checkpoint: Checkpoint, next: Hint, stays: Collection[str] = ()) -> None:
    """Raise SurgeryError where an optimizer keeps more of the gradients than its two moments, but
    for the keys `stays`: it would not agree with new ones of these two. AMSGrad divides by its
    max_exp_avg_sq, whatever exp_avg_sq is."""
    for each in checkpoint.state_dicts():
        known = recognise(each, checkpoint.known)
        usual = {*MOMENTS, *NUMBERED, *STEPS, *stays}
        if more := [key for key in changing(each, known, usual) if ROLES.get(key) not in BESIDE]:
            raise SurgeryError(
                f"{each.file.name}: {known.name} keeps {', '.join(more)} beside the two moments, "
                "and that would stay as it is",
                next=next,
            )


def refuse_codes(checkpoint: Checkpoint, next: Hint) -> None:
    """Raise SurgeryError where an optimizer keeps moments in objects of its own, as torchao does
    those of fewer bits: they are no parts, and would be passed over."""
    for each in checkpoint.state_dicts():
        places = [place for kind in MOMENTS for place in each.state.get(kind, ())]
        kept = [p.value for p in places if isinstance(p.value, (Object, Mapping))]
        if kept:
            what = {class_of(value) for value in kept if isinstance(value, Object)}
            raise SurgeryError(
                f"{each.file.name}: {recognise(each, checkpoint.known).name} keeps its moments in "
                f"{', '.join(sorted(what)) or 'objects'}, as codes of fewer bits do, which are "
                "neither read nor filled",
                next=next,
            )


def refuse_numberless(checkpoint: Checkpoint, what: str, next: Hint) -> None:
    """Raise SurgeryError for moments that are kept as codes, which can't be `what`: averaged,
    scaled, clipped."""
    for place in (place for kind in MOMENTS for place in checkpoint.locate(kind)):
        if isinstance(place.value, Tensor) and place.value.dtype not in ITEM:
            raise SurgeryError(
                f"{place.file.name}: the moments are {place.value.dtype}, which can't be {what}",
                next=next,
            )


BESIDE = ("weights", "count of updates", "rate or product of rates")
"""Roles of what no gradient is in."""


def refuse_second_copies(run: Run, checkpoint: Checkpoint, parts: Sequence[Part]) -> None:
    """Raise SurgeryError where the step has its weights a second time, which no part is of."""
    for where, path in named_copies(run, checkpoint, parts):
        moments = "graft, clip_moments and reset work on the moments"
        raise SurgeryError(
            f"{where} holds a second copy of the weights, as an average does, and would stay as it "
            "is; which of the two is trained is not known here",
            next=moments if path else [f"move {where} out of the run if no load needs it", moments],
        )


def named_copies(
    run: Run, checkpoint: Checkpoint, parts: Sequence[Part]
) -> Iterator[tuple[str, tuple[Key, ...]]]:
    """What a message calls each second copy of the weights, and its key path."""
    files = run.format.files(run.root, checkpoint.step)
    for file, path in second_copies(checkpoint, parts, files):
        yield f"{run.relative(file)}{': ' if path else ''}{'.'.join(map(str, path))}", path


def with_copies(run: Run, checkpoint: Checkpoint, changes: Iterable[Change]) -> list[AnyChange]:
    """The changes of shards, and the same ones of their copies."""
    out: list[AnyChange] = []
    repeats: dict[str, list[str]] = {}
    for copy, shard in copies(checkpoint).items():
        repeats.setdefault(run.relative(shard), []).append(run.relative(copy))
    for change in changes:
        out.append(change)
        out += (replace(change, file=copy) for copy in repeats.get(change.file, ()))
    return out


def matching(
    parameters: Mapping[Parameter, Mapping[str, Sequence[Part]]], pattern: str, key: str
) -> list[Parameter]:
    """Those whose names match. Raises UsageError with the nearest names where none does."""
    chosen = expressions.matching(pattern, (name for name, _ in parameters), key)
    return [parameter for parameter in parameters if parameter[0] in chosen]


def covering(part: Part, masters: Sequence[Part]) -> Sequence[Part]:
    """`masters`. Raises SurgeryError where they do not cover the weights, element by element."""
    at, size = part.first, part.end - part.start
    for stretch in masters:
        if stretch.first != at:
            break
        at += stretch.end - stretch.start
    if at - part.first != size:
        raise SurgeryError(
            f"{part.parameter} has {count(size, 'weight')} and {at - part.first} fp32 masters",
            next=command("verify", "--level", "3", why="list what contradicts itself"),
        )
    return masters


def new_weights(
    run: Run,
    part: Part,
    masters: Sequence[Sequence[Part]],
    opened: Sequence[Checkpoint],
    rule: str,
    numbers: tuple[float, ...],
    label: str,
) -> Change:
    """A parameter's weights as `rule` makes them of its masters, rounded from the new ones; one of
    `masters` for each of `opened`, or the weights themselves where nothing else is kept.

    Raises SurgeryError where the masters do not cover the weights, element by element."""
    terms = [
        tuple(source(run, of, s.place, s.start, s.end) for s in covering(part, stretches))
        for stretches, of in zip(masters, opened, strict=True)
    ]
    own = all(stretches[0].kind == "weights" for stretches in masters)
    return change(run, part, rule, tuple(terms), numbers, label, via="" if own else "float32")


def change(
    run: Run,
    part: Part,
    rule: str,
    terms: tuple[tuple[Numbers, ...], ...],
    numbers: tuple[float, ...],
    label: str,
    via: str = "",
) -> Change:
    """The new numbers of one stretch. Raises SurgeryError for a dtype that can't be computed."""
    tensor = part.place.value
    if tensor.dtype not in ITEM:
        raise SurgeryError(
            f"{part.parameter}: its {part.kind} are {tensor.dtype}, which can't be computed with",
            next="reset the moments, or train with an optimizer that keeps floats",
        )
    size = (part.end - part.start) * ITEM_BYTES[tensor.dtype]
    new = Computed(rule, tensor.dtype, size, terms, numbers, via, label)
    whole = part.start == 0 and part.end == tensor.numel
    elements = None if whole else (part.start, part.end)
    file, path = run.relative(part.place.file), part.place.path
    return Change(file, f"{part.kind} of {part.parameter}", "values", new, path, elements)


def sources_of(run: Run, steps: Iterable[int]) -> list[Path]:
    """Every file of these steps: what a plan that reads them relies on."""
    return [file for step in steps for file in run.format.files(run.root, step)]
