"""What makes the next update of a saved optimizer that of a new one on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptsurgeon.edits import ABSENT, ZEROS
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.moments import ALL, NUMBERED
from ckptsurgeon.formats.optimizers.entry import ABSENT_KEY, ANEW, CONSTANT, NOTHING, ZERO, Entry
from ckptsurgeon.formats.optimizers.roles import ROLES
from ckptsurgeon.formats.optimizers.table import STEPS, recognise
from ckptsurgeon.formats.protocol import Checkpoint
from ckptsurgeon.formats.values import Place, Setting, StateDict

WITHOUT = "start the trainer without its saved optimizer state"


def renewed(checkpoint: Checkpoint) -> list[Setting]:
    """A new value for every place of every optimizer in `checkpoint`: of its moments, of what else
    it keeps, of its step. Raises SurgeryError for a key that no known optimizer has, and for an
    optimizer of which no edit makes a new one, with the reason."""
    state_dicts = checkpoint.state_dicts()
    if not any(each.group or each.state or each.beside for each in state_dicts):
        raise SurgeryError(
            f"{checkpoint.path.name} holds no optimizer state",
            next="ckptsurgeon status    a step that was saved with it",
        )
    rest: list[Setting] = []
    whole: list[Place] = []
    for each in state_dicts:
        known = recognise(each)
        if known.refused:
            raise SurgeryError(
                f"{each.file.name}: {known.name} can't begin anew in place: {known.refused}",
                next=WITHOUT,
            )
        rest += _counters(each, known)
        if not (reasons := _reasons(each, known)):
            rest += _in_place(checkpoint, each, known)
        elif each.whole:
            whole += each.whole
            rest += [Setting(f"state of {known.name}", place, ABSENT) for place in each.whole]
        else:
            raise SurgeryError(
                f"{each.file.name}: {known.name} makes {'; '.join(reasons)}, and only some "
                "trainers load an optimizer without it",
                next=WITHOUT,
            )
    moments = [Setting(name, p, p.zero) for name in ALL for p in checkpoint.locate(name)]
    steps = [Setting("adam step", p, _zero(p.value)) for p in checkpoint.locate("adam_step")]
    if not rest:  # nearly always
        return [*moments, *steps]
    gone = {(place.file, place.path) for place in whole}
    done = {(setting.place.file, setting.place.path) for setting in rest}

    def stays(place: Place) -> bool:
        if not gone:
            return (place.file, place.path) not in done
        places = ((place.file, place.path[:end]) for end in range(len(place.path)))
        return (place.file, place.path) not in done and gone.isdisjoint(places)

    return [
        *(setting for setting in moments if stays(setting.place)),
        *rest,
        *(setting for setting in steps if stays(setting.place)),
    ]


def _zero(value: Any) -> int | float:
    return 0.0 if isinstance(value, float) else 0


def _reasons(state_dict: StateDict, known: Entry) -> list[str]:
    """What only the optimizer itself can make."""
    reasons = []
    for key, places in state_dict.state.items():
        start = known.state.get(key)
        made = any(_is_made(place.value) for place in places)
        if start == ANEW or (made and start != CONSTANT):
            reasons.append(f"{key} ({ROLES[key]}) itself when it begins")
    switches = state_dict.group.get(known.unless, ()) if known.unless else ()
    if state_dict.state and any(place.value for place in switches):
        reasons.append(f"its state from the first gradient or a constant ({known.unless} is not 0)")
    return reasons


def _is_made(value: Any) -> bool:
    """Whether a value of the state is neither a tensor nor a number."""
    return value is not None and not isinstance(value, (Tensor, bool, int, float))


def _in_place(checkpoint: Checkpoint, state_dict: StateDict, known: Entry) -> Iterator[Setting]:
    """What is kept besides the moments, which `locate` finds with their codes, and the step."""
    for key, places in state_dict.state.items():
        start = known.state.get(key, CONSTANT)
        if start == CONSTANT or key in ALL or key in NUMBERED or key in STEPS:
            continue
        for place in places:
            if isinstance(place.value, Tensor) and start == ZERO:
                yield Setting(key, place, ZEROS)
            elif isinstance(place.value, Tensor):  # of one element, as torch keeps a number
                old = checkpoint.value(place.file, place.path)
                yield Setting(key, place._replace(value=old), float(start))
            elif place.value is not None and not isinstance(place.value, bool):
                new = 0 if start == ZERO else start
                yield Setting(key, place, type(place.value)(new))


def _counters(state_dict: StateDict, known: Entry) -> Iterator[Setting]:
    for key, start in known.counters.items():
        for place in state_dict.group.get(key, ()):
            if start == ABSENT_KEY:
                yield Setting(key, place, ABSENT)
            elif start == NOTHING:
                yield Setting(key, place, None)
            elif isinstance(start, str):
                origins = {other.path[:-1]: other.value for other in state_dict.group[start[1:]]}
                yield Setting(key, place, origins[place.path[:-1]])
            else:
                yield Setting(key, place, int(start) if isinstance(place.value, int) else start)
