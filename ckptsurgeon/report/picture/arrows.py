"""The arrows from where a branch was left back to the step from which training went on.

They run above the curves, each at a height at which it crosses no other, with its label on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptsurgeon.plans.frozen import frozen

MOST = 8
"""Heights. With more the labels would take the picture; then arrows share the last one."""
LABEL = 120
"""Characters of a label."""


@frozen
class Arrow:
    """From (`x`, `y`) back to (`to_x`, `to_y`), all of the loss's axes; `row` counts from the top
    of the curves."""

    x: float
    y: float
    to_x: float
    to_y: float
    text: str
    row: int


def rows(spans: Sequence[tuple[float, float]], gap: float) -> list[int]:
    """A row for each span, so that spans of one row are `gap` apart; the shortest lies lowest, or
    it would be crossed by those that end inside it."""
    out = [0] * len(spans)
    taken: list[list[tuple[float, float]]] = []
    for i in sorted(range(len(spans)), key=lambda i: (spans[i][1] - spans[i][0], i)):
        low, high = spans[i]
        row = next(
            (
                k for k, used in enumerate(taken)
                if all(high + gap < a or b + gap < low for a, b in used)
            ),
            len(taken),
        )  # fmt: skip
        row = min(row, MOST - 1)
        while len(taken) <= row:
            taken.append([])
        taken[row].append((low, high))
        out[i] = row
    return out


def label(receipt: str | None, title: str, why: str, most: int = LABEL) -> str:
    """The receipt's number and the reason, or what was done where none was given, in at most so
    many characters."""
    most = min(most, LABEL)
    words = f"{receipt}  {why or title}" if receipt else "the trainer went back by itself"
    return words if len(words) <= most else f"{words[: most - 1]}…"
