"""What stands on the axes of the loss beside its curves: what lies beyond them, and where no number
is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import count
from ckptsurgeon.report.picture.legend import MARKS
from ckptsurgeon.report.picture.theme import NORMAL, SMALL
from ckptsurgeon.report.picture.ticks import short

if TYPE_CHECKING:
    from ckptsurgeon.look.timeline import Timeline
    from ckptsurgeon.report.picture.limits import Limits
    from ckptsurgeon.report.picture.theme import Theme

COLUMNS = 120
"""Of the width, in each of which there is at most one mark at an edge."""


def beyond(
    axes: Any,
    x: Any,
    y: Any,
    shown: Limits,
    theme: Theme,
    span: tuple[float, float],
    late: Callable[[float, str], bool],
) -> None:
    """A mark at the edge for what lies beyond it, with how far the furthest does. `span` is the x
    axis; words that are `late` stand left of their mark."""
    import numpy as np

    slack = 1e-9 * (abs(shown.high) + abs(shown.low))  # a logarithm and back
    for side, edge in (("^", shown.high), ("v", shown.low)):
        over = y > edge + slack if side == "^" else y < edge - slack
        points = np.flatnonzero(over & np.isfinite(y))
        if not len(points):
            continue
        columns = np.round((x[points] - span[0]) / (span[1] - span[0]) * COLUMNS)
        first = points[np.unique(columns, return_index=True)[1]]
        axes.plot(x[first], [edge] * len(first), side, color=theme.bad, markersize=5, zorder=7,
                  clip_on=False)  # fmt: skip
        far = points[(np.argmax if side == "^" else np.argmin)(y[points])]
        words = short(float(f"{y[far]:.3g}"))
        words += "" if len(points) == 1 else f", {count(len(points), 'point')}"
        left = late(float(x[far]), words)
        axes.annotate(
            words, (x[far], edge), xytext=(-6 if left else 6, 0), textcoords="offset points",
            fontsize=SMALL, color=theme.bad, ha="right" if left else "left", va="center",
            zorder=8, bbox=ground(theme),
        )  # fmt: skip


def no_numbers(axes: Any, bands: Sequence[tuple[float, float]], y: Any, theme: Theme) -> None:
    """A band where the loss is no number, which a line would leave out; the widest is named."""
    import numpy as np

    for a, b in bands:
        axes.axvspan(a, b, color=theme.bad, alpha=0.2, linewidth=0, zorder=1)
    if bands:
        a, b = max(bands, key=lambda band: band[1] - band[0])
        axes.text(
            (a + b) / 2, 0.5, "NaN" if np.isnan(y).any() else "Inf", fontsize=NORMAL,
            transform=axes.get_xaxis_transform(), color=theme.bad, fontweight="bold", ha="center",
            va="center", zorder=8, bbox=ground(theme),
        )  # fmt: skip


def left_off(
    axes: Any, x: float, y: float, last: float, theme: Theme, late: Callable[[float, str], bool]
) -> None:
    """A cross at the last number of a branch that was left, and what came after it if its `last`
    loss is none. Its band would lie on the line that is kept."""
    axes.plot([x], [y], "x", color=theme.bad, markersize=8, markeredgewidth=2, zorder=7)
    if not math.isfinite(last):
        words = f"then {'NaN' if math.isnan(last) else 'Inf'}"
        left = late(x, words)
        axes.annotate(
            words, (x, y), xytext=(-7 if left else 7, 0), textcoords="offset points",
            fontsize=SMALL, color=theme.bad, ha="right" if left else "left", va="center",
            zorder=8, bbox=ground(theme),
        )  # fmt: skip


def ground(theme: Theme) -> dict[str, Any]:
    """The box behind words that stand on lines."""
    return {"facecolor": theme.ground, "edgecolor": "none", "alpha": 0.8, "pad": 0.6}


def saved(axes: Any, timeline: Timeline, of: Callable[[Sequence[int]], Any], theme: Theme) -> None:
    """The row of the steps on disk, what became of them, and which of them the advice names. `of`
    is where steps are on the x axis."""
    axes.set_ylim(-1, 1)
    axes.set_yticks([0], ["saved"])
    axes.grid(False)
    groups: dict[str, list[int]] = {}
    for step, state in timeline.saved.items():
        groups.setdefault(state, []).append(step)
    for state, steps in groups.items():
        marker, size, color, filled = MARKS[state]
        shade = getattr(theme, color)
        look = {"facecolors": shade if filled else "none", "edgecolors": shade}
        axes.scatter(
            of(steps), [0] * len(steps), s=size, marker=marker, linewidths=1.2, zorder=4,
            clip_on=False, **({"color": shade} if marker == "x" else look),
        )  # fmt: skip
    diagnosis = timeline.advice
    for item in (item for item in diagnosis.candidates if item.step == diagnosis.back_to):
        (x,) = of([item.at])
        axes.scatter([x], [0], s=130, marker="o", facecolors="none", zorder=5, clip_on=False,
                     edgecolors=theme.sign, linewidths=1.8)  # fmt: skip
    for item in diagnosis.candidates:
        (x,) = of([item.at])
        axes.scatter([x], [0.78], s=16, marker="v", color=theme.sign, zorder=5, clip_on=False)
