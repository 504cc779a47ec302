"""The picture as one HTML file: light and dark, with its words as text."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from ckptsurgeon.report.picture.footer import footer, headline
from ckptsurgeon.report.picture.sheet import draw
from ckptsurgeon.report.picture.theme import DARK, LIGHT, Theme

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptsurgeon.look.story import Story

_STYLE = """
:root { color-scheme: light dark;
        --ink: #1f2328; --muted: #656d76; --ground: #ffffff; --line: #e7eaee }
.dark-only { display: none }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --muted: #8d96a0; --ground: #0d1117; --line: #22282f }
  .light-only { display: none } .dark-only { display: block }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
       max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
svg { width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
         vertical-align: top; font-variant-numeric: tabular-nums }
th { color: var(--muted); font-weight: 500 }
h2 { font-size: 1rem; margin: 1.5rem 0 0 }
"""


def page(story: Story, x: str = "steps") -> bytes:
    """One self-contained file: no script, nothing is loaded from anywhere."""
    pictures = [
        f'<div class="{theme.name}-only">{_svg(story, x, theme)}</div>' for theme in (LIGHT, DARK)
    ]
    told = story.advice
    left = [
        (item.receipt or "", f"{int(item.curves['loss'].steps[0])} to "
         f"{int(item.curves['loss'].steps[-1])}", "" if item.to is None else str(item.to),
         item.why or item.title)
        for item in story.left
    ]  # fmt: skip
    saved = [
        (str(item.step), "sound" if item.sound else "; ".join(item.findings),
         str(item.distance.steps), "go back here" if item.step == told.back_to else "")
        for item in told.candidates
    ]  # fmt: skip
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(story.name)}</title><style>{_STYLE}</style></head><body>",
        *pictures,
        _table("Abandoned branches", ("receipt", "steps", "resumed from", "why"), left),
        _table("Saved before the onset", ("step", "state", "steps back", ""), saved),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part).encode()


def _svg(story: Story, x: str, theme: Theme) -> str:
    """The element alone, with what a screen reader says of it, and names that no other has."""
    text = draw(story, "svg", x, theme).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{theme.name}-", text)
    words = escape(f"{story.name}, {headline(story)}. {footer(story)}", quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{words}"', 1)


def _table(title: str, head: Iterable[str], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    first = "".join(f"<th>{escape(item)}</th>" for item in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(item)}</td>" for item in row) + "</tr>" for row in rows
    )
    return f"<h2>{escape(title)}</h2><table><tr>{first}</tr>{body}</table>"
