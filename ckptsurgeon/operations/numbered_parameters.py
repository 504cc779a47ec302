"""Parameters that an optimizer numbers, 0, 1, 2, …, by the names that these numbers stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Part
from ckptsurgeon.formats.fields.values import NUMBER
from ckptsurgeon.operations.parameter_names import PAGE


def named(parts: Sequence[Part], order: Sequence[str], where: str) -> list[Part]:
    """The parts, with the names that `order` has for numbers. Raises SurgeryError where a number
    has none, or another size than the weights of that name."""
    weights: dict[str, list[Part]] = {}
    for part in parts:
        if part.kind == "weights":
            weights.setdefault(part.parameter, []).append(part)
    return [_named(part, order, weights, where) for part in parts]


def _named(
    part: Part, order: Sequence[str], weights: Mapping[str, Sequence[Part]], where: str
) -> Part:
    digits = part.parameter.removeprefix(NUMBER)
    if not part.parameter.startswith(NUMBER) or not digits.isdigit():
        return part
    number = int(digits)
    name = order[number] if number < len(order) else ""
    own = weights.get(name, ())
    if len(own) == 1 and own[0].end - own[0].start == part.end:
        return part._replace(parameter=name, cut=own[0].cut, box=own[0].box)
    sizes = " and ".join(str(each.end - each.start) for each in own) or "no weights"
    raise SurgeryError(
        f"{where}: {part.parameter} has {part.end} elements, and {name or 'nothing'}, which is "
        f"number {number} by the order, has {sizes}",
        next=f"write the names in the order of the param groups: {PAGE}",
    )


def order_of(path: str) -> list[str]:
    """The names in a file, one a line."""
    try:
        lines = Path(path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", next=f"--order FILE    {PAGE}") from None
    return [line.strip() for line in lines if line.strip()]
