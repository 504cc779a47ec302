"""What the attic keeps, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.report.style import Row, Style, count, size, table

if TYPE_CHECKING:
    from ckptsurgeon.run.attic import Attic


def attic(attics: Sequence[Attic], style: Style) -> str:
    """One line for each surgery whose attic would go."""
    if not attics:
        return "nothing to prune: no surgery keeps files"
    rows = [Row(k.id, size(k.bytes), f"{count(k.files, 'file')}   {k.title}", "-") for k in attics]
    return "\n".join(table(rows, style))


def attic_json(attics: Sequence[Attic], removed: bool) -> dict[str, Any]:
    """The document of `prune`; `removed` is false with --dry-run."""
    listed = [{"id": k.id, "title": k.title, "files": k.files, "bytes": k.bytes} for k in attics]
    return {"schema": SCHEMA, "removed": removed, "attics": listed}
