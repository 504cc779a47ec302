"""One thing that a look at a run finds wrong, and what helps."""

from __future__ import annotations

from dataclasses import dataclass

from ckptsurgeon.hints import Hint


@dataclass(frozen=True)
class Finding:
    """What is wrong, and what to do next; None where the step itself is damaged: doctor knows the
    way back."""

    what: str
    next: Hint | None = None
