"""A diff as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import count
from ckptsurgeon.report.changes import changes
from ckptsurgeon.report.document import SCHEMA, changes_json, plain
from ckptsurgeon.report.style import MANY, Style, clean, table

if TYPE_CHECKING:
    from ckptsurgeon.look.diff.diff import Diff
    from ckptsurgeon.look.diff.tensors import Tensors

SHOWN = 20
"""Tensors that are named."""


def diff(found: Diff, style: Style) -> str:
    """The changes as a plan shows them, then the tensors, the most changed first."""
    lines = [f"{clean(found.one)} → {clean(found.other)}", ""]
    sides = None if found.of_surgery else (clean(found.one), clean(found.other))
    lines += (
        table(changes(found.changes, sides=sides), style)
        if found.changes
        else ["  no value differs"]
    )
    if found.tensors is None:
        lines.append("  not compared: tensors (--tensors)")
    else:
        lines += _tensors(found.tensors)
    return "\n".join([*lines, *(f"  not compared: {clean(text)}" for text in found.not_compared)])


def _tensors(found: Tensors) -> list[str]:
    head = f"  tensors: {found.identical} identical, {len(found.changed)} changed"
    lines = [f"{head}, {len(found.missing)} missing, {len(found.reshaped)} reshaped"]
    worst = sorted(found.changed, key=lambda item: -(item.relative or 0))
    for item in worst[:SHOWN]:
        amount = count(item.elements, "element")
        if item.relative is not None:
            amount = f"{item.relative:.3g} of its norm, at most {item.largest:.3g}, in {amount}"
        lines.append(f"    {clean(item.name)}: {amount}")
    lines += [f"    {clean(name)}: {where}" for name, where in found.missing[:MANY]]
    lines += [f"    {clean(name)}: {old} → {new}" for name, old, new in found.reshaped[:MANY]]
    hidden = max(0, len(found.changed) - SHOWN) + max(0, len(found.missing) - MANY)
    hidden += max(0, len(found.reshaped) - MANY)
    return [*lines, f"    and {hidden} more: --json has all"] if hidden else lines


def diff_json(found: Diff) -> dict[str, Any]:
    """The document of `diff`."""
    tensors = None
    if found.tensors is not None:
        tensors = {
            "identical": found.tensors.identical,
            "changed": plain(found.tensors.changed),
            "missing": [{"name": n, "where": where} for n, where in found.tensors.missing],
            "reshaped": [
                {"name": n, "old": old, "new": new} for n, old, new in found.tensors.reshaped
            ],
        }
    return {
        "schema": SCHEMA,
        "a": found.one,
        "b": found.other,
        "same": found.same,
        "changes": changes_json(found.changes),
        "tensors": tensors,
        "not_compared": list(found.not_compared),
    }
