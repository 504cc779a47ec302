"""What `ready` answers, as a line or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptsurgeon.hints import apart, text
from ckptsurgeon.report.style import GREEN, RED, Style, clean

if TYPE_CHECKING:
    from ckptsurgeon.look.ready import Readiness


def ready(seen: Readiness, style: Style) -> str:
    """One line: what the next start loads, or the first thing that is wrong with it."""
    if seen.found:
        first, *more = seen.found
        others = f" (and {len(more)} more)" if more else ""
        said = clean(f"{first.what}{others}; next: {text(seen.next)}")
        return f"{style.paint('not ready:', RED)} {said}"
    what = "starts from scratch: no step is saved"
    if not seen.from_scratch:
        what = f"step {seen.step}, {seen.path}, sound at level {seen.level}"
    done = "" if seen.receipt is None else f"; repaired by surgery {seen.receipt}"
    return f"{style.paint('ready:', GREEN)} {clean(what + done)}"


def ready_json(seen: Readiness) -> dict[str, Any]:
    """The document of `ready`."""
    from ckptsurgeon.report.document import SCHEMA

    command, comment = apart(seen.next) if seen.found else (None, None)
    return {
        "schema": SCHEMA,
        "ready": seen.ready,
        "step": seen.step,
        "path": None if seen.path is None else str(seen.path),
        "from_scratch": seen.from_scratch,
        "level": seen.level,
        "findings": [finding.what for finding in seen.found],
        "sound": seen.sound,
        "receipt": seen.receipt,
        "next": command,
        "comment": comment,
    }
