"""What to do about a run that diverges: what its logs say, and what others did in such a case."""

from __future__ import annotations

from ckptsurgeon.look.advise.advice import (
    DIVERGED,
    HEALTHY,
    OPEN,
    RECOVERED,
    UNKNOWN,
    Advice,
    advise,
    judge,
)

__all__ = ["DIVERGED", "HEALTHY", "OPEN", "RECOVERED", "UNKNOWN", "Advice", "advise", "judge"]
