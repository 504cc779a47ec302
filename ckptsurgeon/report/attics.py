"""What the attic keeps, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import count
from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.style import Row, Style, size, table

if TYPE_CHECKING:
    from ckptsurgeon.run.attic import Attic


def attic(attics: Sequence[Attic], style: Style) -> str:
    """One line for each surgery whose attic would go, and for each that stays."""
    gone = [kept for kept in attics if not kept.stays]
    total = Row("total", size(sum(kept.bytes for kept in gone)), sign="-")
    rows = table([*map(_row, attics), *[total] * (len(gone) > 1)], style)
    if all(kept.stays for kept in attics):
        rows.insert(0, "nothing to prune: no surgery keeps files" + " that may go" * bool(rows))
    return "\n".join(rows)


def pruned(attics: Sequence[Attic]) -> str:
    """What is gone, and how much it was."""
    ids = ", ".join(kept.id for kept in attics)
    total = size(sum(kept.bytes for kept in attics))
    return f"removed for good: {total} in {count(len(attics), 'attic')}, of {ids}"


def _row(kept: Attic) -> Row:
    what = f"stays: {kept.stays}" if kept.stays else kept.title
    mark = " " if kept.stays else "-"
    return Row(kept.id, size(kept.bytes), f"{count(kept.files, 'file')}   {what}", mark)


def attic_json(attics: Sequence[Attic], removed: bool) -> dict[str, Any]:
    """The document of `prune`; `removed` is false with --dry-run."""
    listed = [
        {
            "id": kept.id,
            "title": kept.title,
            "files": kept.files,
            "bytes": kept.bytes,
            "stays": kept.stays or None,
        }
        for kept in attics
    ]
    return {"schema": SCHEMA, "removed": removed, "attics": listed}
