"""The words of a picture: the verdict above it, and at its foot what was kept and discarded."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptsurgeon.logs.curves import Branch
from ckptsurgeon.logs.signals import LOSS, SAMPLES, TOKENS
from ckptsurgeon.look.advise import DIVERGED
from ckptsurgeon.look.timeline import ATTIC, PRUNED
from ckptsurgeon.report.advice import short, verdict
from ckptsurgeon.report.picture.legend import legend
from ckptsurgeon.report.picture.theme import NORMAL, SMALL, Theme

if TYPE_CHECKING:
    from ckptsurgeon.look.timeline import Timeline

LETTER = 0.55
"""The width of a letter, as a share of its height, at most for a usual text."""
UNITS = ((TOKENS, "tokens"), (SAMPLES, "samples"), (LOSS, "steps"))


def headline(timeline: Timeline) -> str:
    """Where the run stands by its logs or by what is saved, and advise's verdict."""
    there = (step for step, state in timeline.saved.items() if state not in (ATTIC, PRUNED))
    step = max(int(timeline.kept[LOSS].steps[-1]), *there, 0)
    return f"at step {step}   ·   {verdict(timeline.advice)}"


def words(
    figure: Any, timeline: Timeline, theme: Theme, size: tuple[float, float]
) -> tuple[float, float]:
    """The name, the verdict and the legend above the axes, and the foot below them; returns where
    the axes end at the top and at the bottom."""
    width, height = size
    letters = int((width - 0.25) * 72 / (LETTER * NORMAL))
    color = theme.bad if timeline.advice.verdict == DIVERGED else theme.muted
    y = height - 0.24
    name = textwrap.shorten(timeline.name, letters * 3 // 4, placeholder="…") or "run"
    figure.text(0.12 / width, y / height, name, fontsize=13, fontweight="bold", va="center")
    for line in textwrap.wrap(headline(timeline), letters)[:4]:
        y -= 0.2
        figure.text(0.12 / width, y / height, line, color=color, va="center")
    below = textwrap.wrap(footer(timeline), letters)[:2]
    for i, line in enumerate(reversed(below)):
        figure.text(0.12 / width, (0.13 + 0.16 * i) / height, line, fontsize=SMALL,
                    color=theme.muted, va="center")  # fmt: skip
    rows = legend(figure, timeline, theme, (y - 0.1) / height, width)
    return (y - 0.24 - 0.18 * rows) / height, (0.52 + 0.16 * len(below)) / height


def footer(timeline: Timeline) -> str:
    """Tokens kept and discarded; in samples, or steps, where the logs do not count tokens. What was
    skipped is neither."""
    signal, unit = next(
        (signal, unit) for signal, unit in UNITS
        if signal in timeline.kept and all(signal in left.curves for left in timeline.left)
    )  # fmt: skip
    branches = (timeline.kept, *(left.curves for left in timeline.left))
    kept, *rest = (_trained(branch, signal, timeline.skips) for branch in branches)
    begun = (_begin(left.curves, signal) for left in timeline.left)
    thrown = sum(rest) - sum(begun)
    text = f"kept {short(kept)} {unit}"
    if thrown:
        share = f"{100 * thrown / (kept + thrown):.0f}\N{NO-BREAK SPACE}%"
        text += f"   ·   discarded {short(thrown)} {unit}, {share} of what was trained"
    return text


def _trained(branch: Branch, signal: str, skips: Sequence[tuple[int, int]]) -> float:
    """The counter at the end of a branch, without the data that it passed over: a range of `skips`
    of which it has no point. A trainer counts that data as consumed."""
    import numpy as np

    curve = branch[signal]
    values = curve.steps if signal == LOSS else curve.values
    trained, done = float(values[-1]), 0
    for first, last in sorted(skips):
        first, done = max(first, done + 1), max(last, done)
        at = int(np.searchsorted(curve.steps, first))
        if first <= last and 0 < at < len(curve) and curve.steps[at] > last:
            share = (last - first + 1) / float(curve.steps[at] - curve.steps[at - 1])
            trained -= share * float(values[at] - values[at - 1])
    return trained


def _begin(branch: Branch, signal: str) -> float:
    """The counter before the first step of a branch."""
    curve = branch[signal]
    if signal == LOSS:
        return float(curve.steps[0] - 1)
    each = float(curve.values[1] - curve.values[0]) if len(curve) > 1 else 0.0
    return float(curve.values[0]) - each
