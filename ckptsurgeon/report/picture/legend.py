"""What the lines, marks and bands of a picture mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptsurgeon.report.picture.theme import Theme

if TYPE_CHECKING:
    from ckptsurgeon.look.story import Story

MARKS = {
    "sound": ("o", 26, "kept", True),
    "unsound": ("X", 40, "bad", True),
    "incomplete": ("o", 26, "bad", False),
    "in the attic": ("s", 20, "muted", False),
    "pruned": ("x", 18, "muted", True),
}
"""State of a saved step → marker, its size, a colour of the theme, and whether it is filled."""


def legend(figure: Any, story: Story, theme: Theme) -> None:
    """Above the picture, of what is in it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = [Line2D([], [], color=theme.kept, linewidth=2, label="kept")]
    if story.left:
        entries.append(
            Line2D([], [], color=theme.left, alpha=0.6, marker="x", markeredgewidth=1.6,
                   markeredgecolor=theme.bad, markersize=6, label="abandoned")
        )  # fmt: skip
    for state in dict.fromkeys(story.saved.values()):
        marker, _, color, filled = MARKS[state]
        shade = getattr(theme, color)
        entries.append(
            Line2D([], [], linestyle="", marker=marker, markersize=5, markeredgecolor=shade,
                   markerfacecolor=shade if filled else "none", label=state)
        )  # fmt: skip
    if story.advice.candidates:
        entries.append(
            Line2D([], [], linestyle="", marker="v", markersize=5, color=theme.sign,
                   label="candidate (ringed: go back here)")
        )  # fmt: skip
    bands: Mapping[str, tuple[Any, str]] = {
        "skipped data": (story.skips, theme.skip),
        "re-warm": (story.rewarms, theme.rewarm),
    }
    for name, (spans, color) in bands.items():
        if spans:
            entries.append(Patch(color=color, alpha=0.3, label=name))
    figure.legend(
        handles=entries, loc="upper right", bbox_to_anchor=(0.98, 0.995), ncols=len(entries),
        frameon=False, fontsize=8.5, handlelength=1.4, columnspacing=1.3, handletextpad=0.5,
    )  # fmt: skip
