"""Lines of loguru's `serialize=True`: an object whose `record` holds all that a line says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptsurgeon.logs.printed.pairs import pairs


def said(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an object of a line says by name: of one of loguru's the pairs in its message, and what
    was bound to it; any other one as it is."""
    record = item.get("record")
    if not isinstance(record, Mapping) or not isinstance(record.get("message"), str):
        return item
    extra, time = record.get("extra"), record.get("time")
    return {
        **pairs(record["message"]),
        **(extra if isinstance(extra, Mapping) else {}),
        "timestamp": time.get("timestamp") if isinstance(time, Mapping) else None,
    }
