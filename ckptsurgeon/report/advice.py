"""Advice as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptsurgeon.hints import Command, command, text
from ckptsurgeon.report.document import SCHEMA, plain
from ckptsurgeon.report.style import (
    GREEN,
    RED,
    YELLOW,
    Row,
    Style,
    clean,
    count,
    hanging,
    number,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptsurgeon.look.advise import Advice
    from ckptsurgeon.look.advise.candidates import Candidate, Distance
    from ckptsurgeon.look.advise.remedies import Remedy
    from ckptsurgeon.look.advise.spikes import Spike

SHOWN = 5
"""Earlier spikes that are listed, the newest."""


@dataclass(frozen=True)
class Proposal:
    """A remedy and the form of its recipe that `plan` accepts; or why it accepts none."""

    remedy: Remedy
    recipe: Mapping[str, Any] | None
    refused: str = ""


def verdict(advice: Advice) -> str:
    """The verdict in one line."""
    spike = advice.spike
    if advice.verdict == "unknown":
        return f"I can't tell: {advice.reason}"
    if advice.verdict == "healthy" or spike is None:
        shifts = [item for item in advice.spikes if item.shift]
        if shifts:
            return (
                f"healthy: the loss jumped at {shifts[-1].first} and has fallen since, "
                "as it does with other data"
            )
        return "healthy: the loss has not left its course, or came back at once"
    if advice.verdict == "too early":
        return f"too early to tell: the loss left its course at step {spike.first}"
    if advice.verdict == "recovered":
        assert spike.last is not None
        took = spike.last - spike.first
        return f"recovered: the loss left its course at step {spike.first}, back {took} steps later"
    return f"the loss diverged at step {spike.first}"


def advice(
    told: Advice,
    proposals: Sequence[Proposal],
    name: str,
    style: Style,
    written: str,
    save: Command,
) -> str:
    """The verdict, what moved first, where to go back to, and what others did; `written` is the
    file that has the first recipe, and `save` the command that writes one."""
    colors = {"healthy": GREEN, "recovered": GREEN, "diverged": RED}
    start, color = f"{clean(name)}   ", colors.get(told.verdict, YELLOW)
    lines = [
        line[: len(start)] + style.paint(line[len(start) :], color)
        for line in hanging(start, verdict(told), style)
    ]
    spike = told.spike
    if spike is not None:
        lines += ["", *table(_evidence(spike, told), style)]
    earlier = [item for item in told.spikes if item is not spike]
    if earlier and told.verdict != "unknown":
        lines += ["", *table(_earlier(earlier), style)]
    if told.candidates:
        rows = [_candidate(item, told) for item in told.candidates]
        lines += ["", "  saved before it, and what going back throws away", *table(rows, style)]
        if told.back_to is None:
            lines.append("  none of them is sound and early enough to go back to")
    elif told.verdict == "diverged":
        lines += ["", "  no step that was saved before it is known here"]
    if proposals:
        lines += ["", "  what others did", *_proposals(proposals, style)]
        next = replace(save, why="the first as a recipe")
        if written:
            next = command("plan", written, why="what it would change")
        if any(item.recipe is not None for item in proposals):
            lines += ["", f"  next   {text(next)}"]
    notes = [note for note in told.curves.notes if note != told.reason]
    lines += [line for note in notes for line in hanging("  note   ", clean(note), style)]
    return "\n".join(lines)


def _evidence(spike: Spike, told: Advice) -> list[Row]:
    rows = [
        Row("first" if i == 0 else "then", f"{sign.signal} at {sign.step}", _rule(sign.rule))
        for i, sign in enumerate(spike.signs)
    ]
    if spike.level is not None:
        peak = "no number" if spike.peak is None else number(float(f"{spike.peak:.4g}"))
        now = told.curves.kept["loss"].values[-1]
        rows.append(Row("loss", f"{spike.level:.4g} before, {peak} at most, {now:.4g} now"))
    if spike.last is not None:
        rows.append(Row("back", f"at {spike.last}"))
    elif told.verdict == "diverged" and told.newest is not None:
        rows.append(Row("back", f"not yet, {count(told.newest - spike.first, 'step')} later"))
    return rows


def _rule(name: str) -> str:
    from ckptsurgeon.look.advise.rules import RULES

    return RULES[name].text


def _earlier(spikes: Sequence[Spike]) -> list[Row]:
    rows = []
    for item in spikes[-SHOWN:]:
        back = "" if item.last is None or item.signal != "loss" else (
            f"back after {count(item.last - item.first, 'step')}"
        )  # fmt: skip
        if item.shift:
            back = "a new level, falling since: other data look like this"
        text = f"{item.signal} at {item.first}"
        rows.append(Row("earlier", text, "; ".join(filter(None, (_rule(item.rule), back)))))
    if len(spikes) > SHOWN:
        rows.append(Row("earlier", f"{len(spikes) - SHOWN} more"))
    return rows


def _candidate(item: Candidate, told: Advice) -> Row:
    assert told.spike is not None
    word = "sound" if item.sound else f"unsound: {clean(item.findings[0])}"
    if item.step == told.back_to:
        word = "sound: go back here"
    elif item.sound and told.back_to is not None and item.step > told.back_to:
        word = "sound, but too near to the first sign"
    before = told.spike.first - item.step
    return Row(f"{item.step}", f"{before} before it, {_distance(item.distance)}", word)


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


def _proposals(proposals: Sequence[Proposal], style: Style) -> list[str]:
    lines = []
    for i, item in enumerate(proposals, 1):
        lines += hanging(f"  {i}  ", f"{item.remedy.name}: {clean(item.remedy.why)}", style)
        if item.recipe is None:
            lines += hanging("       not here: ", clean(item.refused), style)
        lines += hanging("       source: ", item.remedy.source, style)
    return lines


def recipe_file(proposal: Proposal, told: Advice) -> str:
    """The recipe as YAML, with what speaks for it and its source."""
    import yaml

    assert told.spike is not None
    first = told.spike.signs[0]
    why = f"{verdict(told)}; {first.signal} first, at {first.step}: {_rule(first.rule)}"
    body = {"name": proposal.remedy.name, "why": why, **(proposal.recipe or {})}
    text = yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=100)
    return (
        f"# {clean(proposal.remedy.why)}.\n# Source: {proposal.remedy.source}.\n"
        f"# Made by `ckptsurgeon advise`; look at it first: ckptsurgeon plan FILE\n{text}"
    )


def advice_json(told: Advice, proposals: Sequence[Proposal], run: str | None) -> dict[str, Any]:
    """The document of `advise`."""
    return {
        "schema": SCHEMA,
        "run": run,
        "verdict": told.verdict,
        "reason": told.reason or None,
        "newest": told.newest,
        "points": told.points,
        "onset": None if told.spike is None else told.spike.first,
        "spikes": [spike_json(item) for item in told.spikes],
        "back_to": told.back_to,
        "candidates": [
            {
                "step": item.step,
                "sound": item.sound,
                "too_near": told.back_to is not None and item.step > told.back_to,
                "distance": plain(item.distance),
                "findings": list(item.findings),
            }
            for item in told.candidates
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
        "notes": list(told.curves.notes),
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
