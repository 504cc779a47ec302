"""What is no tensor in a transplant: counters, settings of param groups, the schedule, by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats import Checkpoint, Place, Setting
from ckptsurgeon.formats.capabilities import CountsMore
from ckptsurgeon.hints import again, command
from ckptsurgeon.operations.numbered_parameters import of_groups
from ckptsurgeon.operations.place_changes import PlaceChanges
from ckptsurgeon.operations.section import Changes
from ckptsurgeon.operations.transplanted_steps import of_each
from ckptsurgeon.operations.transplanted_tensors import Tensors
from ckptsurgeon.run.run import Run

IN_GROUPS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum")
COUNTERS = (
    "iteration", "skipped_steps", "consumed_samples", "tokens", "data_epoch", "data_batches",
    "data_tokens",
)  # fmt: skip
SETTINGS = (
    "max_lr", "min_lr", "warmup", "decay", "decay_style", "position", "rewarm",
    "clip_grad", "loss_scale", "seed", "skip",
)  # fmt: skip
STATE = "scheduler"
SOURCE, TEMPLATE = "source", "template"
"""Whose the settings of the param groups are."""


def numbers(
    run: Run, checkpoint: Checkpoint, donor: Checkpoint, tensors: Tensors, settings: bool
) -> Changes:
    """Each field that both keep becomes that of the source, wherever it is kept, those of the param
    groups only with `settings`. What one of the two keeps alone is left to who compares what the
    next steps would use."""
    made = PlaceChanges(run)
    warnings: list[str] = []
    steps = donor.state().step
    for field in (*COUNTERS, *SETTINGS):
        own, theirs = checkpoint.locate(field), donor.locate(field)
        value = _one(donor, field) if theirs else None
        if field == "iteration":
            value = steps
        if own and value is None and field in COUNTERS and not theirs:
            warnings.append(
                f"{field} stays {next(iter(own)).value}, as the new trainer counted it: the source "
                "keeps none of it"
            )
        if field == "position" and own:
            value, sentences = _position(checkpoint, donor, value)
            warnings += sentences
        if field in LENGTHS and own and theirs and not _counts_alike(checkpoint, donor):
            warnings.append(f"{field} stays {own[0].value}: the source counts it in another unit")
            continue
        if value is None:
            continue
        if field in COUNTERS and field != "iteration" and own:
            for setting in _follows(checkpoint, field, value):
                made.put(setting.field, setting.place, setting.value)
        for place in own:
            made.put(field, place, _like(place.value, value))
    for place, value in _adam_steps(checkpoint, donor, tensors):
        made.put("adam_step", place, _like(place.value, value))
    _schedules(made, checkpoint, donor)
    for field in IN_GROUPS if settings else ():
        own, theirs = checkpoint.locate(field), donor.locate(field)
        if own and theirs:
            for place, value in _grouped(checkpoint, donor, own, theirs, field, tensors):
                made.put(field, place, _like(place.value, value))
    known = dict(reversed(_more(donor)))
    for name, place in _more(checkpoint):
        value = known[name].value if name in known else steps if name in UPDATES else place.value
        if _length(value) == _length(place.value):
            made.put(name, place, value)
        else:
            warnings.append(
                f"{name} stays as the new trainer saved it: the source has {_length(value)} "
                f"numbers there, and this step {_length(place.value)}"
            )
    return list(made.changes.values()), list(dict.fromkeys(warnings))


def _adam_steps(
    checkpoint: Checkpoint, donor: Checkpoint, tensors: Tensors
) -> Iterator[tuple[Place, Any]]:
    """Each parameter's own from the same one of the source, where both keep one for each; those
    that the source has not keep theirs. All others are that of the source."""
    own = checkpoint.locate("adam_step")
    if not own or not donor.locate("adam_step"):
        return
    named = {(place.file, place.path): name for name, place in tensors.steps.items()}
    theirs = of_each(donor, tensors.theirs)

    @cache
    def of_all() -> Any:
        return _one(donor, "adam_step")

    for place in own:
        name = named.get((place.file, place.path), "")
        sources = [s for way in tensors.origins.get(name, ()) for s in way.sources if s in theirs]
        values = {theirs[source].value for source in sources}
        if name not in tensors.fresh:
            yield place, values.pop() if len(values) == 1 else of_all()


LENGTHS = ("warmup", "decay")
"""Of a schedule, counted as its position is."""


def _of_samples(checkpoint: Checkpoint) -> bool | None:
    """Whether the schedule counts samples, and not updates; None where it keeps no position."""
    positions = checkpoint.locate("position")
    if not positions or not isinstance(positions[0].value, (int, float)):
        return None
    return bool(positions[0].value > checkpoint.state().step)


def _counts_alike(checkpoint: Checkpoint, donor: Checkpoint) -> bool:
    return _of_samples(checkpoint) == _of_samples(donor)


def _position(checkpoint: Checkpoint, donor: Checkpoint, theirs: Any) -> tuple[Any, list[str]]:
    """Where the schedule stands, counted as it counts: as often as the source made updates, by the
    new trainer's batch, where the source counts in another unit or not at all."""
    samples = _of_samples(checkpoint)
    if samples is None or samples == _of_samples(donor):
        return theirs, []
    steps, own = donor.state().step, checkpoint.state().step
    now = checkpoint.locate("position")[0].value
    value = steps * now // own if samples and own else steps
    unit = "samples, by the batch of the new trainer" if samples else "updates"
    why = "counts no position" if theirs is None else f"is at {theirs} in another unit"
    return value, [f"position is {value} {unit}: the source {why}"]


UPDATES = ("global_steps", "num_updates", "lr_scheduler.last_epoch")
"""Of the further counters, what counts updates."""


def _more(checkpoint: Checkpoint) -> list[tuple[str, Place]]:
    able = CountsMore.optional(checkpoint)
    return [] if able is None else able.further_counters()


def _follows(checkpoint: Checkpoint, field: str, value: Any) -> list[Setting]:
    """What the trainer keeps beside a counter and must agree with it."""
    try:
        return checkpoint.recount(field, value)[0]
    except SurgeryError:
        return []


def _one(donor: Checkpoint, field: str) -> Any:
    """The value of the source. Raises SurgeryError where it has several that are used."""
    wins = {_hashable(place.value): place.value for place in donor.locate(field) if place.wins}
    values = list(wins.values())
    if len(values) > 1:
        raise SurgeryError(
            f"{field} of the source is not one number: {values[0]} and {values[1]}",
            next=command("show", why="of which parameters"),
        )
    return values[0] if values else None


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, (list, dict)) else value


def _like(old: Any, new: Any) -> Any:
    """`new` as the kind of number, or of sequence, that is there."""
    if old is None or new is None or isinstance(old, Tensor) or type(old) is type(new):
        return new
    if isinstance(old, bool) or not isinstance(old, (int, float, str, list, tuple)):
        return new
    if isinstance(old, int) and isinstance(new, float) and not new.is_integer():
        return new
    return type(old)(new)


# --- the state of a scheduler --------------------------------------------------------------------


def _schedules(made: PlaceChanges, checkpoint: Checkpoint, donor: Checkpoint) -> None:
    """Of a scheduler with the same keys every number; of another kind nothing, as what its numbers
    mean is not the same."""
    theirs = donor.locate(STATE)
    for place in checkpoint.locate(STATE):
        if not theirs or not isinstance(place.value, Mapping):
            continue
        other = theirs[0].value
        if not isinstance(other, Mapping) or other.keys() != place.value.keys():
            continue
        for key, old in place.value.items():
            new = other[key]
            if not (_is_plain(old) and _is_plain(new)) or _length(old) != _length(new):
                continue
            path = (*place.path, key)
            if checkpoint.value(place.file, path) is not None:
                made.put(f"{STATE}.{key}", Place(place.file, path, old), new)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(item is None or isinstance(item, (bool, int, float, str)) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else -1


# --- param groups --------------------------------------------------------------------------------


def _grouped(
    checkpoint: Checkpoint,
    donor: Checkpoint,
    own: Sequence[Place],
    theirs: Sequence[Place],
    field: str,
    tensors: Tensors,
) -> Iterator[tuple[Place, Any]]:
    """Of each param group the value that the same parameters have in the source: by their names;
    between runs of one trainer that saves no names, by the number of the group. Where neither says
    it, groups that have the same values in both keep them, and others raise SurgeryError."""
    values = dict.fromkeys(_hashable(place.value) for place in theirs)
    if len(values) == 1:
        yield from ((place, theirs[0].value) for place in own)
        return
    mine = of_groups(checkpoint, field, tensors.order)
    by_key = {_key(place): place.value for place in donor.settings(field)}
    named = {
        name: by_key[key]
        for key, names in of_groups(donor, field, tensors.their_order).items()
        for name in names
        if key in by_key
    }
    inside = {_key(place) for place in checkpoint.settings(field)}
    groups = {_group(donor, place): place.value for place in donor.settings(field)}
    by_path = {place.path: place.value for place in theirs}
    same = {_hashable(place.value) for place in own} == set(values)
    made: list[tuple[Place, Any]] = []
    for place in own:
        names = mine.get(_key(place))
        number = _group(checkpoint, place) if _key(place) in inside else None
        there = [tensors.called.get(name, name) for name in names or ()]
        found = [named[name] for name in there if name in named]
        if found and all(_hashable(value) == _hashable(found[0]) for value in found):
            made.append((place, found[0]))
        elif found:
            raise _unclear(field, f"group {number}")
        elif (names and named) or (names == () and any(mine.values())):
            continue  # parameters that the source has not, or none at all
        elif tensors.alike and place.path in by_path:
            made.append((place, by_path[place.path]))
        elif tensors.alike and number in groups:
            made.append((place, groups[number]))
        elif number is not None and not same:
            raise _unclear(field, f"group {number}")
    if not tensors.alike and all(len(names) == 1 for names in mine.values()):
        _refuse_torn_groups(field, made)
    yield from made


def _refuse_torn_groups(field: str, made: Sequence[tuple[Place, Any]]) -> None:
    """Raise where parameters that keep their settings one by one, with the same value in the fresh
    step, would get several: those of one param group must have one, or the trainer won't load."""
    values: dict[Any, Any] = {}
    for place, value in made:
        known = values.setdefault(_hashable(place.value), value)
        if _hashable(known) != _hashable(value):
            raise _unclear(field, f"the one with {place.value}")


def _unclear(field: str, which: str) -> SurgeryError:
    return SurgeryError(
        f"{field} differs between the param groups of the source, and which of them {which} "
        "here is does not follow from the names of their parameters",
        next=(
            again(
                "--settings",
                TEMPLATE,
                why="keep those of the new trainer",
                setting=f"transplant.settings={TEMPLATE}",
            ),
            "or split the param groups of the new trainer as those of the source are",
        ),
    )


def _key(place: Place) -> tuple[Any, ...]:
    return place.file, place.path


def _group(checkpoint: Checkpoint, place: Place) -> int | None:
    try:
        return checkpoint.group_of(place)
    except (ValueError, IndexError, TypeError):
        return None
