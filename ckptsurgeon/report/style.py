"""Colour, width, aligned tables, and how a value is written."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from ckptsurgeon.hints import Hint, text
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.report.terminal import colored

GREEN, YELLOW, RED = "32", "33", "31"
"""Done, moved aside, refused. The signs `+ ~ > <` say the same without colour."""
RATES = ("lr", "max_lr", "min_lr")
MANY = 6
"""So many names of one kind are listed; of more, the first three and the last."""


@frozen
class Style:
    """How wide a line may be, and whether colours are wanted."""

    width: int = 100
    color: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """As wide as the terminal, and in colour where `terminal.colored` says so."""
        return cls(max(32, shutil.get_terminal_size((100, 24)).columns), colored(stream))

    def paint(self, text: str, code: str) -> str:
        """`text` in the colour `code`, or as it is."""
        return f"\033[{code}m{text}\033[0m" if self.color and code else text


@frozen
class Row:
    """One line of a table: label, text, a note in a column of its own, and the sign of a change."""

    label: str
    text: str
    note: str = ""
    sign: str = ""


ALIGNED = 44
"""The longest text that notes are aligned behind."""
_COLUMNS: tuple[Callable[[Row], str], ...] = (
    lambda row: row.label,
    lambda row: row.text,
    lambda row: row.note,
)


def table(rows: Iterable[Row], style: Style) -> list[str]:
    """Aligned lines; a label is printed once for the rows that follow each other under it.

    A note that does not fit beside its text stands below it. No line is wider than the style, but
    for a command: who copies half of it runs half of it."""
    rows = list(rows)
    label = max((len(row.label) for row in rows), default=0) + 2
    signed = any(row.sign for row in rows)
    room = max(style.width - 2 - label - 2 * signed, 16)
    beside = [row for row in rows if row.note and len(row.text) + 3 + len(row.note) <= room]
    column = max((len(row.text) for row in beside if len(row.text) <= ALIGNED), default=0)
    lines, last = [], ""
    for row in rows:
        name = "" if row.label == last else row.label
        last, sign = row.label, row.sign
        color = YELLOW if sign in ("<", ">") else ""
        for part in _parts(row, column, room):
            start = f"  {name:<{label}}" + (f"{sign or ' '} " if signed else "")
            lines.append(style.paint(f"{start}{part}", color))
            name = sign = ""
    return lines


def fits(rows: Sequence[Row], style: Style) -> bool:
    """Whether each row takes one line of a table, and all notes begin in one column."""
    widest = [max((len(part(row)) for row in rows), default=0) for part in _COLUMNS]
    return 2 + widest[0] + 2 + widest[1] + 3 + widest[2] <= style.width and widest[1] <= ALIGNED


def _parts(row: Row, column: int, room: int) -> list[str]:
    """What stands right of a label: one line, or as many as it takes. A note that is too long for
    its column begins as far left of it as it must."""
    width = max(0, min(column, room - 3 - len(row.note)))
    beside = f"{row.text:<{width}}   {row.note}" if row.note else row.text
    if len(beside) <= room:
        return [beside]
    below = [f"  {line}" for line in wrapped(row.note, room - 2)] if row.note else []
    return [*wrapped(row.text, room), *below]


def wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width`; a command stays whole, and what is said about it goes
    below it."""
    command, gap, comment = text.partition("    ")
    if len(text) <= width or not command.startswith("ckptsurgeon "):
        return _packed(text.split("   "), width)
    return [command, *(f"  {line}" for line in _lines(comment, width - 2) if gap)]


def _lines(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 8), break_on_hyphens=False) or [""]


def hanging(start: str, text: str, style: Style) -> list[str]:
    """`start` and `text`; further lines stand below the text."""
    lines = _lines(text, style.width - len(start))
    return [f"{' ' * len(start) if i else start}{line}" for i, line in enumerate(lines)]


def with_apply(shown: str, command: Hint) -> str:
    """What a dry run would do, and below it the command that does it."""
    return f"{shown}\n  apply    {text(command)}"


def packed(label: str, items: Sequence[str], style: Style) -> list[str]:
    """`label`, then as many items a line as fit, the rest below the first item."""
    lines = _packed(items, style.width - len(label))
    return [f"{' ' * len(label) if i else label}{line}" for i, line in enumerate(lines)]


def _packed(items: Sequence[str], width: int) -> list[str]:
    lines, line = [], ""
    for piece in (piece for item in items for piece in _lines(item, width)):
        if line and len(line) + 3 + len(piece) > width:
            lines.append(line)
            line = ""
        line += f"   {piece}" if line else piece
    return [*lines, line]


# --- values --------------------------------------------------------------------------------------


def value(field: str, item: Any) -> str:
    """A value as people write it: rates as 3.000e-05, ranges as A-B or A, nothing unprintable."""
    if item is None or item == "":
        return "nothing"
    if field == "skip" and isinstance(item, (list, tuple)):
        ends = [(first,) if first == last else (first, last) for first, last in item]
        return ", ".join("-".join(map(str, end)) for end in ends) or "none"
    if field == "rewarm" and isinstance(item, (list, tuple)) and len(item) == 3:
        return clean(f"{item[0]} to sample {item[2]}, from {item[1]}")
    if isinstance(item, (list, tuple)):
        texts = [value(field, inner) for inner in item]
        if len(texts) > MANY and len(set(texts)) == 1:
            return f"{texts[0]}  (all {len(texts)})"
        if len(texts) > MANY:
            return f"{', '.join(texts[:3])} … {texts[-1]}  ({len(texts)})"
        return ", ".join(texts) or "none"
    if isinstance(item, float):
        return f"{item:.3e}" if field in RATES else number(item)
    bare = str(item).removesuffix("\n")  # many a pointer ends with one
    text = bare if bare.isprintable() else clean(str(item))
    return text if len(text) <= 60 else f"{text[:57]}…"


def number(item: float) -> str:
    """The shortest text that reads back as the same float: 0.999, 1e-08, 2048. Of one that was
    computed, which takes 16 digits, the first ten."""
    short = f"{item:.6g}"
    if float(short) == item:
        return short
    return repr(item) if float(f"{item:.14g}") == item else f"{item:.10g}"


def clean(text: str) -> str:
    """`text` without control characters: what a file holds must not drive a terminal."""
    return text if text.isprintable() else repr(text)


def arrow(field: str, old: Any, new: Any) -> str:
    """`old → new`, with as many digits as tell them apart."""
    left, right = value(field, old), value(field, new)
    if left == right:
        left, right = repr(old), repr(new)
    return f"{left} → {right}"


def names(items: Sequence[str]) -> str:
    """All of a few names; of many, the first three and the last."""
    if len(items) <= MANY:
        return " ".join(items)
    return f"{' '.join(items[:3])} … {items[-1]}  ({len(items)})"


def size(number: float) -> str:
    """Bytes in decimal units."""
    if number < 1000:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:.1f} TB"
