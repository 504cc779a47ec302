"""One thing that a look at a run finds wrong, and what helps."""

from __future__ import annotations

from ckptsurgeon.hints import Hint
from ckptsurgeon.plans.frozen import frozen


@frozen
class Finding:
    """What is wrong, and what to do next; None where the step itself is damaged: doctor knows the
    way back."""

    what: str
    next: Hint | None = None
