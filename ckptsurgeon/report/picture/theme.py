"""The colours of a picture on light and on dark ground, and the size of its letters."""

from __future__ import annotations

from ckptsurgeon.plans.frozen import frozen

NORMAL, SMALL = 10.0, 9.0
"""Points of letters."""


@frozen
class Theme:
    """`kept` and `left` are the branches; `bad` is what is broken, `sign` what advise points at."""

    name: str
    ground: str
    ink: str
    muted: str
    grid: str
    kept: str
    left: str
    bad: str
    sign: str
    skip: str
    rewarm: str


LIGHT = Theme(
    "light", "#ffffff", "#1f2328", "#656d76", "#e7eaee", "#0a5fb4", "#c2613f", "#cf222e",
    "#8250df", "#d4a72c", "#4d9e5a",
)  # fmt: skip
DARK = Theme(
    "dark", "#0d1117", "#e6edf3", "#8d96a0", "#22282f", "#58a6ff", "#f0926b", "#ff7b72",
    "#bc8cff", "#d9a93a", "#57ab5a",
)  # fmt: skip
