"""The picture as one HTML file: light and dark, with its words as text."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from ckptsurgeon.hints import apart
from ckptsurgeon.report.advice import recipe_file, verdict
from ckptsurgeon.report.picture.footer import footer, headline
from ckptsurgeon.report.picture.sheet import NARROW, WIDE, draw
from ckptsurgeon.report.picture.theme import DARK, LIGHT, Theme

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptsurgeon.hints import Hint
    from ckptsurgeon.look.advise import Advice
    from ckptsurgeon.look.advise.candidates import Candidate
    from ckptsurgeon.look.timeline import Timeline
    from ckptsurgeon.report.advice import Proposal

_STYLE = """
:root { color-scheme: light dark;
        --ink: #1f2328; --muted: #656d76; --ground: #ffffff; --line: #e7eaee }
.light-narrow, .dark-wide, .dark-narrow { display: none }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --muted: #8d96a0; --ground: #0d1117; --line: #22282f }
  .light-wide { display: none } .dark-wide { display: block }
}
@media (max-width: 640px) {
  .light-wide, .dark-wide { display: none } .light-narrow { display: block }
}
@media (max-width: 640px) and (prefers-color-scheme: dark) {
  .light-narrow { display: none } .dark-narrow { display: block }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
       max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
svg { width: 100%; height: auto }
pre { background: var(--line); padding: .6rem .8rem; border-radius: 6px; overflow-x: auto;
      font-size: 13px; line-height: 1.45 }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
         vertical-align: top; font-variant-numeric: tabular-nums }
th { color: var(--muted); font-weight: 500 }
h2 { font-size: 1rem; margin: 1.5rem 0 0 }
"""


def page(
    timeline: Timeline,
    x: str = "steps",
    proposals: Sequence[Proposal] = (),
    chosen: Proposal | None = None,
    next: Hint | None = None,
) -> bytes:
    """One self-contained file: no script, nothing is loaded from anywhere. The `proposals` are
    those of advise, and `next` is the command that writes the `chosen` one and plans it."""
    pictures = [
        f'<div class="{theme.name}-{name}">{_svg(timeline, x, theme, size, name)}</div>'
        for theme in (LIGHT, DARK)
        for name, size in (("wide", WIDE), ("narrow", NARROW))
    ]
    diagnosis = timeline.advice
    left = [
        (item.receipt or "", f"{int(item.curves['loss'].steps[0])} to "
         f"{int(item.curves['loss'].steps[-1])}", "" if item.to is None else str(item.to),
         item.why or item.title)
        for item in timeline.left
    ]  # fmt: skip
    saved = [
        (str(item.step), "sound" if item.sound else "; ".join(item.findings),
         str(item.distance.steps), _advised(item, diagnosis))
        for item in diagnosis.candidates
    ]  # fmt: skip
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(timeline.name)}</title><style>{_STYLE}</style></head><body>",
        *pictures,
        *_recipes(timeline, proposals, chosen, next),
        _table(
            "Earlier checkpoints and what you would lose",
            ("step", "state", "steps lost", ""),
            saved,
        ),
        _table("Abandoned branches", ("receipt", "steps", "resumed from", "why"), left),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part).encode()


def _recipes(
    timeline: Timeline, proposals: Sequence[Proposal], chosen: Proposal | None, next: Hint | None
) -> list[str]:
    """What to do: the command, the recipe that it writes, and what others did instead."""
    if not proposals:
        return []
    parts = ["<h2>What to do</h2>", f"<p>{escape(verdict(timeline.advice))}</p>"]
    if chosen is not None and next is not None:
        parts += [
            f"<p>{escape(chosen.remedy.name)}: {escape(chosen.remedy.why)}. This command writes "
            "the recipe and shows its plan; it changes nothing in the run.</p>",
            f"<pre>{escape(apart(next)[0])}</pre>",
            f"<pre>{escape(recipe_file(chosen, timeline.advice))}</pre>",
        ]
    rows = [
        (str(i), item.remedy.name, item.remedy.why,
         item.remedy.source if item.recipe is not None else f"not here: {item.refused}")
        for i, item in enumerate(proposals, 1)
    ]  # fmt: skip
    return [*parts, _table("What others did", ("--recipe", "", "why", "source"), rows)]


def _advised(item: Candidate, diagnosis: Advice) -> str:
    if item.step == diagnosis.back_to:
        return "go back here"
    return "too close to onset" if item.sound and item.too_near else ""


def _svg(timeline: Timeline, x: str, theme: Theme, size: tuple[float, float], name: str) -> str:
    """The element alone, with what a screen reader says of it, and names that no other has."""
    text = draw(timeline, "svg", x, theme, size).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{theme.name}-{name}-", text)
    words = escape(f"{timeline.name}, {headline(timeline)}. {footer(timeline)}", quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{words}"', 1)


def _table(title: str, head: Iterable[str], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    first = "".join(f"<th>{escape(item)}</th>" for item in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(item)}</td>" for item in row) + "</tr>" for row in rows
    )
    return f"<h2>{escape(title)}</h2><table><tr>{first}</tr>{body}</table>"
