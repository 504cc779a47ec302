"""Parameters that an optimizer numbers, 0, 1, 2, …, by the names that these numbers stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from ckptsurgeon.errors import SurgeryError, UsageError, count
from ckptsurgeon.formats import Checkpoint, Part
from ckptsurgeon.formats.capabilities import NamesGroups, names_in
from ckptsurgeon.formats.fields.values import NUMBER
from ckptsurgeon.formats.tensors.blocks import Kinds, by_name
from ckptsurgeon.hints import again
from ckptsurgeon.operations.parameter_names import PAGE, Names
from ckptsurgeon.operations.refusals import Refusals
from ckptsurgeon.plans.edits import Key


def order_of(path: str) -> list[str]:
    """The names in a file, one a line."""
    try:
        lines = Path(path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", next=f"--order FILE    {PAGE}") from None
    return [line.strip() for line in lines if line.strip()]


def order_of_each(
    order: Sequence[str], own: Sequence[Part], theirs: Sequence[Part]
) -> tuple[list[str], list[str]]:
    """The names in the order that this run has, and those that the source has: of runs that call
    them otherwise, it has those of both. Raises SurgeryError for one that neither has weights of.
    """
    mine, others = (
        {part.parameter for part in parts if part.kind == "weights"} for parts in (own, theirs)
    )
    if lost := [name for name in order if name not in mine | others]:
        raise SurgeryError(
            f"the order has {lost[0]}, and neither of the two steps has weights by that name",
            next=f"write the names as the steps have them: {PAGE}",
        )
    if len(set(order)) == len(order):
        return [name for name in order if name in mine], [name for name in order if name in others]
    return _of_two(order, mine, others)


def _of_two(order: Sequence[str], mine: Set[str], others: Set[str]) -> tuple[list[str], list[str]]:
    """The names of each of two runs that share some of them, one run after the other. Raises
    SurgeryError where it is not clear which of the two comes first."""
    own = [i for i, name in enumerate(order) if name not in others]
    their = [i for i, name in enumerate(order) if name not in mine]
    first = [list(dict.fromkeys(n for n in order if n in names)) for names in (mine, others)]
    last = [
        list(dict.fromkeys(n for n in reversed(order) if n in names))[::-1]
        for names in (mine, others)
    ]
    if first == last:
        return first[0], first[1]
    if own and their and own[-1] < their[0]:
        return first[0], last[1]
    if own and their and their[-1] < own[0]:
        return last[0], first[1]
    twice = next(name for i, name in enumerate(order) if name in order[:i])
    raise SurgeryError(
        f"the order has {twice} twice, and of which run it is there is not clear",
        next=f"write all names of one run, and then all of the other: {PAGE}",
    )


def order_in(checkpoint: Checkpoint) -> list[str]:
    """The names of the parameters in the order of the param groups, where the step says it: what
    the numbers of the same trainer's optimizer mean."""
    able = NamesGroups.optional(checkpoint)
    if able is None:
        return []
    try:
        groups = {place.path: names for names, place in able.of_parameters("weight_decay")}
    except SurgeryError:
        return []
    return list(dict.fromkeys(name for names in groups.values() for name in names))


def orders_alike(
    orders: tuple[list[str], list[str]],
    checkpoint: Checkpoint,
    own: Sequence[Part],
    donor: Checkpoint,
    theirs: Sequence[Part],
    names: Names,
) -> tuple[list[str], list[str]]:
    """The names of what this step numbers, in the order of a step of the same trainer that names
    them, and of what that step numbers, in the order of this one; by the page, where the two call
    them otherwise; `orders` are those that are known already. Raises SurgeryError where none of
    these names is one of the step that numbers."""
    mine, others = (
        list(dict.fromkeys(p.parameter for p in parts if not p.parameter.startswith(NUMBER)))
        for parts in (own, theirs)
    )
    ways = names.origins(others, mine, Refusals(kept=True))
    called = {name: origins[0].sources[0] for name, origins in ways.items()}
    here = {source: name for name, source in called.items()}
    found = []
    for order, step, parts, known, other, new in (
        (orders[0], checkpoint, own, mine, donor, here),
        (orders[1], donor, theirs, others, checkpoint, called),
    ):
        if order:
            found.append(order)
            continue
        order = [new.get(name, name) for name in order_in(other)]
        numbers = any(part.parameter.startswith(NUMBER) for part in parts)
        if numbers and order and known and set(order).isdisjoint(known):
            (like,) = get_close_matches(order[0], known, 1, 0)
            raise SurgeryError(
                f"{step.path.name} numbers the states of its optimizer, and {other.path.name}, "
                f"which names them, calls the parameters otherwise: {order[0]} there, "
                f"{like} here",
                next=names.between(others, mine),
            )
        found.append(order)
    return found[0], found[1]


def with_names(
    checkpoint: Checkpoint, parts: list[Part], order: Sequence[str], page: Callable[[], str]
) -> dict[str, Kinds]:
    """The parts by name. Raises SurgeryError for moments whose parameters have no names: numbers
    run over the groups of one optimizer, and in another one they are those of others. Its way out
    has the `page` that the names need as well."""
    if order:
        parts = _with_names(checkpoint, parts, order)
    found = by_name(parts)
    nameless = [name for name in found if name.startswith(NUMBER)]
    if nameless:
        raise SurgeryError(
            f"{checkpoint.path.name} numbers the states of its optimizer, and does not say which "
            f"parameter {nameless[0].removeprefix(NUMBER)} is",
            next=again(
                "--order",
                "FILE",
                *(("--names", needed) if (needed := page()) else ()),
                why=f"their names, one a line: {PAGE}",
                setting="transplant.order=FILE",
            ),
        )
    return found


def _with_names(checkpoint: Checkpoint, parts: Sequence[Part], order: Sequence[str]) -> list[Part]:
    """The parts, with the names that `order` has for numbers. Raises SurgeryError where a number
    has none, or another size than the weights of that name."""
    weights: dict[str, list[Part]] = {}
    for part in parts:
        if part.kind == "weights":
            weights.setdefault(part.parameter, []).append(part)
    orders: dict[Path, Sequence[str]] = {}
    out = []
    for part in parts:
        digits, file = part.parameter.removeprefix(NUMBER), part.place.file
        if part.parameter.startswith(NUMBER) and digits.isdigit():
            if file not in orders:
                orders[file] = names_in(checkpoint, file, order)
            part = _named(part, int(digits), orders[file], weights, checkpoint.path.name)
        out.append(part)
    return out


def _named(
    part: Part,
    number: int,
    order: Sequence[str],
    weights: Mapping[str, Sequence[Part]],
    where: str,
) -> Part:
    name = order[number] if number < len(order) else ""
    own = weights.get(name, ())
    if len(own) == 1 and own[0].end - own[0].start == part.end:
        return part._replace(parameter=name, cut=own[0].cut, box=own[0].box)
    sizes = " and ".join(str(each.end - each.start) for each in own) or "no weights"
    raise SurgeryError(
        f"{where}: {part.parameter} has {count(part.end, 'element')}, and {name or 'nothing'}, "
        f"which is number {number} by the order, has {sizes}",
        next=f"write the names in the order of the param groups: {PAGE}",
    )


def of_groups(
    checkpoint: Checkpoint, key: str, order: Sequence[str]
) -> dict[tuple[Path, tuple[Key, ...]], tuple[str, ...]]:
    """The parameters of the group of each place of `key`, where the step names them, or numbers
    them and `order` has their names."""
    able = NamesGroups.optional(checkpoint)
    with suppress(SurgeryError):
        if able is not None:
            return {(place.file, place.path): names for names, place in able.of_parameters(key)}
    out = {}
    for place in checkpoint.settings(key) if order else ():
        numbers = checkpoint.value(place.file, checkpoint.beside(place, "params"))
        names = names_in(checkpoint, place.file, order)
        if isinstance(numbers, (list, tuple)) and all(
            isinstance(number, int) and number < len(names) for number in numbers
        ):
            out[place.file, place.path] = tuple(names[number] for number in numbers)
    return out
