"""Advice as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import count
from ckptsurgeon.hints import text
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.report.document import SCHEMA, plain
from ckptsurgeon.report.style import (
    GREEN,
    RED,
    YELLOW,
    Row,
    Style,
    clean,
    hanging,
    number,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptsurgeon.hints import Hint
    from ckptsurgeon.look.advise import Advice
    from ckptsurgeon.look.advise.candidates import Candidate, Distance
    from ckptsurgeon.look.advise.remedies import Remedy
    from ckptsurgeon.look.advise.signs import Spike

SHOWN = 5
"""Earlier spikes of the loss that are listed, the newest."""
LOST = ("NaN", "Inf")
LAST = 11
"""Points whose median is what the loss is now."""


@frozen
class Proposal:
    """A remedy and the form of its recipe that `plan` accepts; or why it accepts none."""

    remedy: Remedy
    recipe: Mapping[str, Any] | None
    refused: str = ""


def verdict(advice: Advice) -> str:
    """The verdict in one line."""
    spike = advice.spike
    if advice.verdict == "unknown":
        return f"unknown: {advice.reason}"
    if advice.verdict == "healthy" or spike is None:
        shifts = [item for item in advice.spikes if item.shift]
        said = f"healthy: no divergence in {_judged(advice)}"
        if not shifts:
            return said
        return f"{said}; new level at {shifts[-1].first:,}, as other data would make it"
    if advice.verdict == "too early":
        after = count((advice.newest or spike.first) - spike.first, "step")
        lost = _lost(advice, spike.first)
        rose = f"is {lost} at {spike.first:,}" if lost else f"rose at {spike.first:,}:"
        size = "" if lost else _rise(advice, spike)
        return f"too early to tell: the loss {rose}{size}, and the log ends {after} later"
    if advice.verdict == "recovered":
        assert spike.last is not None
        took = count(spike.last - spike.first, "step")
        return f"recovered: the loss rose at {spike.first:,} and was back after {took}"
    first = spike.signs[0].signal
    sign = "" if first == "loss" else f"; first sign: {first.replace('-', ' ')}"
    return f"diverged at {spike.first:,}: loss{_rise(advice, spike)}{sign}"


def _rise(advice: Advice, spike: Spike) -> str:
    """The mean before, and the median of the last points; NaN or Inf where these are no numbers."""
    now = _now(advice)
    return f" {now}" if spike.level is None else f" {spike.level:.3g} → {now}"


def _lost(advice: Advice, step: int) -> str:
    """NaN or Inf where the loss is so at this step, else nothing."""
    import numpy as np

    loss = advice.curves.kept["loss"]
    value = float(loss.values[min(int(np.searchsorted(loss.steps, step)), len(loss) - 1)])
    return "" if np.isfinite(value) else LOST[0] if np.isnan(value) else LOST[1]


def _now(advice: Advice) -> str:
    import numpy as np

    last = advice.curves.kept["loss"].values[-LAST:]
    if not np.isfinite(last[-3:]).any():
        return LOST[0] if np.isnan(last[-3:]).any() else LOST[1]
    return f"{float(np.median(last[np.isfinite(last)])):.3g}"


def _judged(advice: Advice) -> str:
    """Which points the rules could judge: those that have enough before them."""
    loss = advice.curves.kept["loss"]
    return f"steps {int(loss.steps[min(advice.unjudged, len(loss) - 1)]):,} to {advice.newest:,}"


def advice(
    diagnosis: Advice,
    proposals: Sequence[Proposal],
    name: str,
    style: Style,
    chosen: Proposal | None,
    next: Hint | None,
) -> str:
    """The verdict, what moved first, where to go back to, what others did, and the command that is
    `next`, for the recipe that was `chosen`."""
    colors = {"healthy": GREEN, "recovered": GREEN, "diverged": RED}
    start, color = f"{clean(name)}   ", colors.get(diagnosis.verdict, YELLOW)
    lines = [
        line[: len(start)] + style.paint(line[len(start) :], color)
        for line in hanging(start, verdict(diagnosis), style)
    ]
    spike = diagnosis.spike
    if spike is not None:
        lines += ["", *table(_evidence(spike, diagnosis), style)]
    earlier = [item for item in diagnosis.spikes if item is not spike]
    if earlier and diagnosis.verdict != "unknown":
        lines += ["", *table(_earlier(earlier), style)]
    if diagnosis.candidates:
        rows = [_candidate(item, diagnosis) for item in diagnosis.candidates]
        lines += ["", "  earlier checkpoints and what you would lose", *table(rows, style)]
        if diagnosis.back_to is None:
            lines.append("  none of them is sound and early enough to go back to")
    elif diagnosis.verdict == "diverged":
        lines += ["", "  no checkpoint from before the onset is known here"]
    if proposals:
        lines += ["", "  what others did", *_proposals(proposals, chosen, style)]
    notes = [note for note in diagnosis.curves.notes if note != diagnosis.reason]
    lines += [line for note in notes for line in hanging("  note   ", clean(note), style)]
    if next is not None:
        lines += ["", f"  next   {text(next)}"]
    return "\n".join(lines)


def _evidence(spike: Spike, diagnosis: Advice) -> list[Row]:
    rows = [
        Row("first" if i == 0 else "then", f"{sign.signal} at {sign.step}", _rule(sign.rule))
        for i, sign in enumerate(spike.signs)
    ]
    lost = any(sign.rule == "nan" and sign.step == spike.broken for sign in spike.signs)
    if spike.broken is not None and not lost:
        rows.append(Row("then", f"loss at {spike.broken}", "not a finite number"))
    if spike.level is not None:
        said = f"mean {spike.level:.4g} before"
        if spike.peak is not None:
            peak = number(float(f"{spike.peak:.4g}"))
            said = f"mean {spike.level:.4g} before, peak {peak}"
        now = _now(diagnosis)
        share = "" if now in LOST or not spike.level else (
            f" ({100 * (float(now) / spike.level - 1):+.0f} %)"
        )  # fmt: skip
        rows.append(Row("loss", f"{said}, {now} now{share}"))
    if spike.last is not None:
        rows.append(Row("back", f"at {spike.last}"))
    elif diagnosis.verdict == "diverged" and diagnosis.newest is not None:
        after = count(diagnosis.newest - spike.first, "step")
        rows.append(Row("back", f"not recovered after {after}"))
    return rows


def _rule(name: str) -> str:
    from ckptsurgeon.look.advise.rules import RULES

    return RULES[name].text


def _earlier(spikes: Sequence[Spike]) -> list[Row]:
    """Those of the loss, the newest; the other signals in one row each."""
    own = [item for item in spikes if item.signal == "loss"]
    rows = []
    for item in own[-SHOWN:]:
        back = "" if item.last is None else f"back after {count(item.last - item.first, 'step')}"
        if item.shift and item.level:
            back = "a new level: other data would look like this"
        said = "; ".join(filter(None, (_rule(item.rule), back)))
        rows.append(Row("earlier", f"loss at {item.first}", said))
    if len(own) > SHOWN:
        rows.append(Row("earlier", f"loss: {len(own) - SHOWN} more"))
    others = [item for item in spikes if item.signal != "loss"]
    for signal in dict.fromkeys(item.signal for item in others):
        every = [item for item in others if item.signal == signal]
        last = f", the last at {every[-1].first}" if len(every) > 1 else f" at {every[-1].first}"
        said = f"{signal}: {count(len(every), 'spike')}{last}"
        rows.append(Row("earlier", said, _rule(every[-1].rule)))
    return rows


def _candidate(item: Candidate, diagnosis: Advice) -> Row:
    assert diagnosis.spike is not None
    word = "sound" if item.sound else f"unsound: {clean(item.findings[0])}"
    if item.step == diagnosis.back_to:
        word = "sound: go back here"
    elif item.sound and item.too_near:
        word = "sound, but too close to onset"
    before = diagnosis.spike.first - item.at
    return Row(f"{item.step}", f"{count(before, 'step')} earlier; {_distance(item.distance)}", word)


def _distance(far: Distance) -> str:
    parts = [count(far.steps, "step")]
    if far.tokens is not None:
        parts.append(f"{short(far.tokens)} tokens")
    elif far.samples is not None:
        parts.append(f"{short(far.samples)} samples")
    if far.hours is not None:
        parts.append(f"{far.hours:.1f} h" if far.hours >= 0.1 else f"{far.hours * 60:.1f} min")
    return ", ".join(parts)


def short(value: float) -> str:
    """A count in thousands, millions, …"""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.4g}{unit}"
        value /= 1000
    return f"{value:.4g}T"


def _proposals(proposals: Sequence[Proposal], chosen: Proposal | None, style: Style) -> list[str]:
    lines = []
    for i, item in enumerate(proposals, 1):
        mark = "→" if item is chosen else " "
        said = f"{item.remedy.name}: {clean(item.remedy.why)}"
        lines += hanging(f"{mark} {i}  ", said, style)
        if item.recipe is None:
            lines += hanging("       not here: ", clean(item.refused), style)
        lines += hanging("       source: ", item.remedy.source, style)
    return lines


def recipe_file(proposal: Proposal, diagnosis: Advice) -> str:
    """The recipe as YAML, with what speaks for it and its source."""
    import yaml

    assert diagnosis.spike is not None
    first = diagnosis.spike.signs[0]
    why = f"{verdict(diagnosis)}; {first.signal} at {first.step}: {_rule(first.rule)}"
    body = {"name": proposal.remedy.name, "why": why, **(proposal.recipe or {})}
    text = yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=100)
    return (
        f"# {clean(proposal.remedy.why)}.\n# Source: {proposal.remedy.source}.\n"
        f"# Made by `ckptsurgeon advise`; look at it first: ckptsurgeon plan FILE\n{text}"
    )


def advice_json(
    diagnosis: Advice, proposals: Sequence[Proposal], run: str | None
) -> dict[str, Any]:
    """The document of `advise`."""
    return {
        "schema": SCHEMA,
        "run": run,
        "verdict": diagnosis.verdict,
        "reason": diagnosis.reason or None,
        "newest": diagnosis.newest,
        "points": diagnosis.points,
        "onset": None if diagnosis.spike is None else diagnosis.spike.first,
        "spikes": [spike_json(item) for item in diagnosis.spikes],
        "back_to": diagnosis.back_to,
        "candidates": [
            {
                "step": item.step,
                "sound": item.sound,
                "too_near": item.too_near,
                "distance": plain(item.distance),
                "findings": list(item.findings),
            }
            for item in diagnosis.candidates
        ],
        "recipes": [
            {
                "name": item.remedy.name,
                "why": item.remedy.why,
                "source": item.remedy.source,
                "recipe": None if item.recipe is None else plain(item.recipe),
                "refused": item.refused or None,
            }
            for item in proposals
        ],
        "notes": list(diagnosis.curves.notes),
    }


def spike_json(item: Spike) -> dict[str, Any]:
    """One spike as `advise --json` has it."""
    return {
        "first": item.first,
        "last": item.last,
        "signal": item.signal,
        "rule": item.rule,
        "malignant": item.malignant,
        "shift": item.shift,
        "level": plain(item.level),
        "peak": plain(item.peak),
        "signs": [
            {"signal": sign.signal, "step": sign.step, "rule": sign.rule} for sign in item.signs
        ],
    }
