"""Cases that hypothesis draws before one start of a library makes all of them."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Case = TypeVar("Case")


def drawn(cases: st.SearchStrategy[Case], count: int) -> list[Case]:
    """So many at most, the simplest one first."""
    found: list[Case] = []

    @given(cases)
    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found
