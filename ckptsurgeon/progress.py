"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the phase, how much of it is done, and how much there is."""


def silent(phase: str, done: int, total: int) -> None:
    """Nobody listens."""
