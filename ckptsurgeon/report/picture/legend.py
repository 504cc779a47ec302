"""What the lines, marks and bands of a picture mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ckptsurgeon.report.picture.theme import SMALL, Theme

if TYPE_CHECKING:
    from ckptsurgeon.look.timeline import Timeline

MARKS = {
    "sound": ("o", 26, "kept", True),
    "unsound": ("X", 40, "bad", True),
    "incomplete": ("o", 26, "bad", False),
    "in the attic": ("s", 20, "muted", False),
    "pruned": ("x", 18, "muted", True),
}
"""State of a saved step → marker, its size, a colour of the theme, and whether it is filled."""


LETTER, BESIDE = 0.072, 0.5
"""Inches of a letter of a name, and of what stands beside the name."""


def legend(figure: Any, timeline: Timeline, theme: Theme, top: float, width: float) -> int:
    """Above the axes, below `top`, of what is in the picture; returns how many rows it takes of
    `width` inches."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = [Line2D([], [], color=theme.kept, linewidth=2, label="kept")]
    if timeline.left:
        entries.append(
            Line2D([], [], color=theme.left, alpha=0.6, marker="x", markeredgewidth=1.6,
                   markeredgecolor=theme.bad, markersize=6, label="abandoned")
        )  # fmt: skip
    for state in dict.fromkeys(timeline.saved.values()):
        marker, _, color, filled = MARKS[state]
        shade = getattr(theme, color)
        entries.append(
            Line2D([], [], linestyle="", marker=marker, markersize=5, markeredgecolor=shade,
                   markerfacecolor=shade if filled else "none", label=state)
        )  # fmt: skip
    if timeline.advice.candidates:
        entries.append(
            Line2D([], [], linestyle="", marker="v", markersize=5, color=theme.sign,
                   label="candidate (ring: go back here)")
        )  # fmt: skip
    bands: Mapping[str, tuple[Any, str]] = {
        "skipped data": (timeline.skips, theme.skip),
        "re-warm": (timeline.rewarms, theme.rewarm),
    }
    for name, (spans, color) in bands.items():
        if spans:
            entries.append(Patch(color=color, alpha=0.3, label=name))
    columns = next((n for n in range(len(entries), 1, -1) if _wide(entries, n) < width - 0.2), 1)
    figure.legend(
        handles=entries, loc="upper left", bbox_to_anchor=(0.02 / width, top), ncols=columns,
        frameon=False, fontsize=SMALL, handlelength=1.4, columnspacing=1.3, handletextpad=0.5,
        labelspacing=0.25,
    )  # fmt: skip
    return -(-len(entries) // columns)


def _wide(entries: Sequence[Any], columns: int) -> float:
    """The inches that a legend of so many columns takes; it is filled column by column."""
    names = [len(entry.get_label()) for entry in entries]
    rows, longer = divmod(len(names), columns)
    ends = [(rows + 1) * min(i, longer) + rows * max(0, i - longer) for i in range(columns + 1)]
    return sum(BESIDE + LETTER * max(names[a:b]) for a, b in pairwise(ends))
