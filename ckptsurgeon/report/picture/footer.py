"""The words of a picture: the verdict above it, and at its foot what was kept and discarded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptsurgeon.logs.curves import Branch
from ckptsurgeon.logs.signals import LOSS, SAMPLES, TOKENS
from ckptsurgeon.look.story import ATTIC, PRUNED
from ckptsurgeon.report.advice import short, verdict

if TYPE_CHECKING:
    from ckptsurgeon.look.story import Story

UNITS = ((TOKENS, "tokens"), (SAMPLES, "samples"), (LOSS, "steps"))


def headline(story: Story) -> str:
    """Where the run stands by its logs or by what is saved, and advise's verdict."""
    there = (step for step, state in story.saved.items() if state not in (ATTIC, PRUNED))
    step = max(int(story.kept[LOSS].steps[-1]), *there, 0)
    return f"at step {step}   ·   {verdict(story.advice)}"


def footer(story: Story) -> str:
    """Tokens kept and discarded; in samples, or steps, where the logs do not count tokens."""
    signal, unit = next(
        (signal, unit) for signal, unit in UNITS
        if signal in story.kept and all(signal in left.curves for left in story.left)
    )  # fmt: skip
    kept = _end(story.kept, signal)
    thrown = sum(_end(left.curves, signal) - _begin(left.curves, signal) for left in story.left)
    text = f"kept {short(kept)} {unit}"
    if thrown:
        share = 100 * thrown / (kept + thrown)
        text += f"   ·   discarded {short(thrown)} {unit}, {share:.0f} % of what was trained"
    return text


def _end(branch: Branch, signal: str) -> float:
    curve = branch[signal]
    return float(curve.steps[-1] if signal == LOSS else curve.values[-1])


def _begin(branch: Branch, signal: str) -> float:
    """The counter before the first step of a branch."""
    curve = branch[signal]
    if signal == LOSS:
        return float(curve.steps[0] - 1)
    each = float(curve.values[1] - curve.values[0]) if len(curve) > 1 else 0.0
    return float(curve.values[0]) - each
