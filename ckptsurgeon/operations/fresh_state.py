"""What makes the next update of a saved optimizer that of a new one on the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.columns import Column, Places
from ckptsurgeon.formats.fields.values import Place, StateDict
from ckptsurgeon.formats.optimizers.entry import ABSENT_KEY, ANEW, CONSTANT, NOTHING, ZERO, Entry
from ckptsurgeon.formats.optimizers.roles import ROLES
from ckptsurgeon.formats.optimizers.table import STEPS, recognise
from ckptsurgeon.formats.places.moments import ALL, NUMBERED
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import ABSENT, ZEROS

WITHOUT = "start the trainer without its saved optimizer state"


class Renewal(NamedTuple):
    """The value `new` for every place of a column; `field` is what a plan calls it."""

    field: str
    column: Column
    new: Any


def renewed(checkpoint: Checkpoint) -> list[Renewal]:
    """A new value for every place of every optimizer in `checkpoint`: of its moments, of what else
    it keeps, of its step. Raises SurgeryError for a key that no known optimizer has, and for an
    optimizer of which no edit makes a new one, with the reason."""
    state_dicts = checkpoint.state_dicts()
    if not any(each.group or each.state or each.beside for each in state_dicts):
        raise SurgeryError(
            f"{checkpoint.path.name} holds no optimizer state",
            next=command("status", why="a step that was saved with it"),
        )
    rest: list[Renewal] = []
    whole: list[Place] = []
    for each in state_dicts:
        known = recognise(each, checkpoint.known)
        if known.refused:
            raise SurgeryError(
                f"{each.file.name}: {known.name} can't be made anew in place: {known.refused}",
                next=WITHOUT,
            )
        rest += _counters(each, known)
        rest += _beside(each, known)
        if not (reasons := _reasons(each, known)):
            rest += _in_place(checkpoint, each, known)
        elif each.whole:
            whole += each.whole
            field = f"state of {known.name}"
            rest += [Renewal(field, column, ABSENT) for column in Places.of(each.whole).columns]
        else:
            raise SurgeryError(
                f"{each.file.name}: {known.name} makes {'; '.join(reasons)}, and only some "
                "trainers load an optimizer without it",
                next=WITHOUT,
            )
    moments = [Renewal(name, c, c.zero) for name in ALL for c in _columns(checkpoint, name)]
    steps = [new for column in _columns(checkpoint, "adam_step") for new in _from_zero(column)]
    if not rest:  # nearly always
        return [*moments, *steps]
    gone = {(place.file, place.path) for place in whole}
    done = {(place.file, place.path) for renewal in rest for place in renewal.column}

    def stays(place: Place) -> bool:
        if not gone:
            return (place.file, place.path) not in done
        places = ((place.file, place.path[:end]) for end in range(len(place.path)))
        return (place.file, place.path) not in done and gone.isdisjoint(places)

    def left(renewals: Iterable[Renewal]) -> Iterator[Renewal]:
        for renewal in renewals:
            if kept := [index for index, place in enumerate(renewal.column) if stays(place)]:
                yield renewal._replace(column=renewal.column.only(kept))

    return [*left(moments), *rest, *left(steps)]


def _columns(checkpoint: Checkpoint, field: str) -> tuple[Column, ...]:
    return Places.of(checkpoint.locate(field)).columns


def _from_zero(column: Column) -> Iterator[Renewal]:
    """Of floats 0.0, of the others 0."""
    for is_float, alike in column.split(lambda value: isinstance(value, float)):
        yield Renewal("adam step", alike, 0.0 if is_float else 0)


def _reasons(state_dict: StateDict, known: Entry) -> list[str]:
    """What only the optimizer itself can make."""
    reasons = []
    for key, places in state_dict.state.items():
        start = known.state.get(key)
        values = chain.from_iterable(column.values for column in Places.of(places).columns)
        one_of_each = {type(value): value for value in values}  # of thousands
        made = any(map(_is_made, one_of_each.values()))
        if start == ANEW or (made and start != CONSTANT):
            reasons.append(f"{key} ({ROLES.get(key, 'a state')}) itself when it begins")
    switches = state_dict.group.get(known.unless, ()) if known.unless else ()
    if state_dict.state and any(place.value for place in switches):
        reasons.append(f"its state from the first gradient or a constant ({known.unless} is not 0)")
    return reasons


def _is_made(value: Any) -> bool:
    """Whether a value of the state is neither a tensor nor a number."""
    return value is not None and not isinstance(value, (Tensor, bool, int, float))


def _in_place(checkpoint: Checkpoint, state_dict: StateDict, known: Entry) -> Iterator[Renewal]:
    """What is kept besides the moments, which `locate` finds with their codes, and the step."""
    for key, places in state_dict.state.items():
        start = known.state.get(key, CONSTANT)
        if start == CONSTANT or key in ALL or key in NUMBERED or key in STEPS:
            continue
        by_new: dict[tuple[type, Any], list[Place]] = {}
        for place in places:
            new: Any = ZEROS
            if isinstance(place.value, Tensor) and start != ZERO:
                # of one element, as torch keeps a number
                place = place._replace(value=checkpoint.value(place.file, place.path))
                new = float(start)
            elif not isinstance(place.value, Tensor):
                if place.value is None or isinstance(place.value, bool):
                    continue
                new = type(place.value)(0 if start == ZERO else start)
            by_new.setdefault((type(new), new), []).append(place)
        for (_, new), mine in by_new.items():
            yield from (Renewal(key, column, new) for column in Places.of(mine).columns)


def _beside(state_dict: StateDict, known: Entry) -> Iterator[Renewal]:
    for key, place in state_dict.beside.items():
        if known.beside[key] == ABSENT_KEY:
            yield Renewal(key, Column.of(place), ABSENT)


def _counters(state_dict: StateDict, known: Entry) -> Iterator[Renewal]:
    for key, start in known.counters.items():
        for place in state_dict.group.get(key, ()):
            column = Column.of(place)
            if start == ABSENT_KEY:
                yield Renewal(key, column, ABSENT)
            elif start == NOTHING:
                yield Renewal(key, column, None)
            elif isinstance(start, str):
                origins = {other.path[:-1]: other.value for other in state_dict.group[start[1:]]}
                yield Renewal(key, column, origins[place.path[:-1]])
            else:
                kind = type(place.value) if isinstance(place.value, (bool, int)) else float
                yield Renewal(key, column, kind(start))
