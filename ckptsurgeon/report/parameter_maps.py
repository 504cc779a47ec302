"""Which parameter is filled from which of another run, as text or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.style import Row, Style, clean, count, table, wrapped

if TYPE_CHECKING:
    from ckptsurgeon.operations.transplant_map import Mapped, Named, ParameterMap


def parameter_map(made: ParameterMap, run: str, style: Style) -> str:
    """A line for each parameter, what is left behind, how many there are of each, and what is
    refused with what to do next."""
    lines = [f"{clean(run)}   step {made.step} from step {made.source_step} of {made.source}", ""]
    lines += table([Row(clean(row.name), _shape(row), _from(row)) for row in made.rows], style)
    if made.left:
        lines += ["", "  left behind:"]
        lines += table([Row(clean(each.name), _shape(each)) for each in made.left], style)
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


def _from(row: Mapped) -> str:
    """From where a parameter comes, or why from nowhere."""
    if row.state == "fresh":
        return "fresh"
    if row.refused:
        return f"refused: {'; '.join(clean(why.what) for why in row.refused)}"
    one = row.sources[0]
    if (row.name, row.shape, row.how, len(row.sources)) == (one.name, one.shape, (), 1):
        return "← the same"
    names = " + ".join(
        clean(each.name) + (f" {_shape(each)}" if each.shape != row.shape else "")
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
