"""Vital signs as text: the ten most unusual, then what the whole step looks like."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptsurgeon.errors import count
from ckptsurgeon.hints import text
from ckptsurgeon.report.style import Style, clean

if TYPE_CHECKING:
    from ckptsurgeon.look.vitals.observations import Observation
    from ckptsurgeon.look.vitals.vitals import Vitals

SHOWN = 10
GROWN = 5


def signs(seen: Vitals, style: Style) -> list[str]:
    """`_signs`, none wider than the style."""
    first, *lines = _signs(seen)
    return [first, *(part for line in lines for part in _fitted(line, style))]


def _fitted(line: str, style: Style) -> list[str]:
    """Further lines stand four columns right of the first. A command stays whole."""
    if len(line) <= style.width or line.startswith("      next: "):
        return [line]
    inner = textwrap.wrap(line.strip(), style.width - 6, break_on_hyphens=False)
    return [f"{'      ' if i else '  '}{part}" for i, part in enumerate(inner)]


def _signs(seen: Vitals) -> list[str]:
    """At most SHOWN sentences, a line each with the parameters that it is said of, what to do below
    the first of each kind, and how many observations more there are; with an earlier step the GROWN
    parameters whose norms grew most."""
    lines = [f"vitals: step {seen.step}, {count(len(seen.signs), 'parameter')}"]
    alike: dict[str, list[Observation]] = {}
    for item in seen.observations:
        alike.setdefault(item.what, []).append(item)
    shown = [(_names(found), found) for found in list(alike.values())[:SHOWN]]
    width = min(max((len(names) for names, _ in shown), default=0), 40)
    said: set[str] = set()
    for names, (item, *_) in shown:
        lines.append(f"  {names:<{width}}  {item.what}")
        if item.kind not in said:
            lines.append(f"      next: {text(seen.next[item.kind])}")
        said.add(item.kind)
    if not seen.observations:
        lines.append("  nothing unusual")
    if more := len(seen.observations) - sum(len(found) for _, found in shown):
        lines.append(f"  and {more} more: --json has all")
    moving = [s.update_rms for s in seen.signs if s.update_rms is not None]
    if moving:
        middle = sorted(moving)[len(moving) // 2]
        floor = "" if seen.noise is None else f" (noise alone: {seen.noise:.2f})"
        lines.append(
            f"  update RMS {min(moving):.2f} to {max(moving):.2f}, median {middle:.2f}{floor}"
        )
    return [
        *lines,
        *_logits(seen),
        *_norms(seen),
        *(f"  not compared: {why}" for why in seen.not_compared),
    ]


def _names(found: Sequence[Observation]) -> str:
    """The parameters that one sentence is said of."""
    others = "" if len(found) == 1 else f" and {count(len(found) - 1, 'other')}"
    return f"{clean(found[0].parameter)}{others}"


def _logits(seen: Vitals) -> list[str]:
    if not seen.attention:
        return []
    top, last = seen.attention[0], seen.attention[-1]
    since = "" if top.before is None else f", at step {seen.against} {top.before:.3g}"
    return [
        f"  attention logits estimated from the weights: RMS {top.rms:.3g} in {clean(top.layer)} "
        f"head {top.head}{since}; least in {clean(last.layer)}, {last.rms:.3g} in its largest head"
    ]


def _norms(seen: Vitals) -> list[str]:
    grown = [item for item in seen.growth if not item.bias]
    if not grown:
        return []
    lines = [f"  norms of the weights since step {seen.against}, the most grown first:"]
    width = min(max(len(item.parameter) for item in grown[:GROWN]), 40)
    for item in grown[:GROWN]:
        norms = f"{item.before:.4g} → {item.norm:.4g}"
        lines.append(f"    {clean(item.parameter):<{width}}  {norms}  × {item.times:.4g}")
    half = grown[len(grown) // 2].times
    lines.append(f"    half of {count(len(grown), 'parameter')} grew × {half:.4g} or more")
    return lines
