"""Which parameter is filled from which of another run, as text or JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import SurgeryError, count, first_few
from ckptsurgeon.operations.transplant_map import Mapped
from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.style import Row, Style, clean, table, wrapped

if TYPE_CHECKING:
    from ckptsurgeon.operations.transplant_map import Named, ParameterMap


IN_NAME = re.compile(r"(?<![^.])(?:0|[1-9]\d*)(?![^.])")
"""A number between dots: of a layer, an expert, a module."""
LETTERS = "ijk"


def parameter_map(made: ParameterMap, run: str, style: Style) -> str:
    """A line for each parameter, one for those that differ in nothing but a number; what is left
    behind, how many there are of each, and what is refused with what to do next."""
    lines = [f"{clean(run)}   step {made.step} from step {made.source_step} of {made.source}", ""]
    lines += table(list(_folded(made.rows, len(LETTERS))), style)
    if made.left:
        lines += ["", "  left behind:"]
        lines += table(list(_folded(made.left, len(LETTERS))), style)
    counts = [f"{len(made.names(state))} {state}" for state in ("filled", "fresh", "refused")]
    counts += [f"{len(made.left)} left behind"]
    counts += [f"{count(made.padding, 'element')} of padding"] if made.padding else []
    lines += ["", f"  {', '.join(counts)}"]
    for why in made.refused:
        lines += table([Row("refused", clean(why.what))], style)
    for hint in _hints([*made.refused, *(why for row in made.rows for why in row.refused)]):
        first, *rest = wrapped(hint, style.width - 11)
        lines += [f"  next     {first}", *(f"           {line}" for line in rest)]
    return "\n".join(lines)


def _folded(rows: Sequence[Named], count: int) -> Iterator[Row]:
    """A line for each, where first it stands. Those that are alike but for the first `count`
    numbers of their names, of which there is every combination, are one line."""
    alike: dict[Row, list[Named]] = {}
    for row in rows:
        alike.setdefault(_line(row, _numbers(row)[:count]), []).append(row)
    for line, found in alike.items():
        numbers = {_numbers(row)[:count] for row in found}
        values = [sorted({*each}) for each in zip(*numbers, strict=True)]
        if len(found) == 1 or not count:
            yield from (_line(row, ()) for row in found)
        elif len(found) == len(numbers) == prod(map(len, values)):
            named = zip(LETTERS, values, strict=False)
            said = ", ".join(f"{letter} = {_range(each)}" for letter, each in named)
            yield Row(line.label, line.text, f"{line.note}, {said}".removeprefix(", "))
        else:
            yield from _folded(found, count - 1)


def _range(values: Sequence[int]) -> str:
    first, last = values[0], values[-1]
    if last - first == len(values) - 1 > 0:
        return f"{first}–{last}"
    return first_few([str(value) for value in values])


def _numbers(row: Named) -> tuple[int, ...]:
    return tuple(int(number) for number in IN_NAME.findall(row.name))


def _line(row: Named, numbers: Sequence[int]) -> Row:
    """That of a parameter, with letters for the first `numbers` of its name, and in other names for
    what is as many more or less."""
    return Row(_lettered(row.name, numbers), _shape(row), _from(row, numbers))


def _lettered(name: str, numbers: Sequence[int]) -> str:
    left = list(zip(LETTERS, numbers, strict=False))[::-1]

    def written(number: re.Match[str]) -> str:
        if not left:
            return number[0]
        letter, value = left.pop()
        more = int(number[0]) - value
        return f"{{{letter}{more:+d}}}" if more else f"{{{letter}}}"

    return clean(IN_NAME.sub(written, name))


def _from(row: Named, numbers: Sequence[int]) -> str:
    """From where a parameter comes, or why from nowhere; nothing of one that is left behind."""
    if not isinstance(row, Mapped):
        return ""
    if row.state == "fresh":
        return "fresh"
    if row.refused:
        own = _lettered(row.name, numbers)
        name = re.compile(rf"(?<![\w.]){re.escape(clean(row.name))}(?!\w)")
        reasons = (name.sub(lambda _: own, clean(why.what)) for why in row.refused)
        return f"refused: {'; '.join(reasons)}"
    one = row.sources[0]
    if (row.name, row.shape, row.how, len(row.sources)) == (one.name, one.shape, (), 1):
        return "← the same"
    names = " + ".join(
        _lettered(each.name, numbers) + (f" {_shape(each)}" if each.shape != row.shape else "")
        for each in row.sources
    )
    return "; ".join([f"← {names}", *row.how])


def _shape(named: Named) -> str:
    return "not known" if named.shape is None else str(list(named.shape))


def _hints(refused: Sequence[SurgeryError]) -> Iterator[str]:
    yield from dict.fromkeys(hint for why in refused for hint in why.next)


def parameter_map_json(made: ParameterMap) -> dict[str, Any]:
    """The document of `transplant --print-map`."""
    return {
        "schema": SCHEMA,
        "step": made.step,
        "source": str(made.source),
        "source_step": made.source_step,
        "parameters": [_row_json(row) for row in made.rows],
        "left": [_named_json(each) for each in made.left],
        "padding": made.padding,
        "refused": [why.what for why in made.refused],
        "next": list(_hints([*made.refused, *(why for row in made.rows for why in row.refused)])),
    }


def _row_json(row: Mapped) -> dict[str, Any]:
    return {
        **_named_json(row),
        "state": row.state,
        "kinds": list(row.kinds),
        "from": [_named_json(each) for each in row.sources],
        "how": list(row.how),
        "refused": [why.what for why in row.refused],
    }


def _named_json(named: Named) -> dict[str, Any]:
    return {"name": named.name, "shape": None if named.shape is None else list(named.shape)}
