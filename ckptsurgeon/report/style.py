"""Colour, width, aligned tables, and how a value is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

GREEN, YELLOW, RED = "32", "33", "31"
"""Done, moved aside, refused. The signs `+ ~ > <` say the same without colour."""
RATES = ("lr", "max_lr", "min_lr")
MANY = 6
"""So many names of one kind are listed; of more, the first three and the last."""


@dataclass(frozen=True)
class Style:
    """How wide a line may be, and whether colours are wanted."""

    width: int = 100
    color: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Colour on a terminal only; NO_COLOR forbids it, FORCE_COLOR asks for it."""
        color = stream.isatty() and os.environ.get("TERM") != "dumb"
        if os.environ.get("FORCE_COLOR"):
            color = True
        if os.environ.get("NO_COLOR"):
            color = False
        return cls(max(60, shutil.get_terminal_size((100, 24)).columns), color)

    def paint(self, text: str, code: str) -> str:
        """`text` in the colour `code`, or as it is."""
        return f"\033[{code}m{text}\033[0m" if self.color and code else text


@dataclass(frozen=True)
class Row:
    """One line of a table: label, text, a note in a column of its own, and the sign of a change."""

    label: str
    text: str
    note: str = ""
    sign: str = ""


def table(rows: Iterable[Row], style: Style) -> list[str]:
    """Aligned lines; a label is printed once for the rows that follow each other under it."""
    rows = list(rows)
    label = max((len(row.label) for row in rows), default=0) + 2
    signed = any(row.sign for row in rows)
    column = max((len(row.text) for row in rows if row.note and len(row.text) <= 44), default=0)
    lines, last = [], ""
    for row in rows:
        name = "" if row.label == last else row.label
        last = row.label
        sign = f"{row.sign or ' '} " if signed else ""
        text = f"{row.text:<{column}}   {row.note}" if row.note else row.text
        color = YELLOW if row.sign in ("<", ">") else ""
        lines.append(style.paint(f"  {name:<{label}}{sign}{text}", color))
    return lines


def packed(label: str, items: Sequence[str], style: Style) -> list[str]:
    """`label`, then as many items a line as fit, the rest below the first item."""
    lines, line = [], label
    for item in items:
        if line.strip() and line != label and len(line) + 3 + len(item) > style.width:
            lines.append(line)
            line = " " * len(label)
        line += item if line.isspace() or line == label else f"   {item}"
    return [*lines, line]


# --- values --------------------------------------------------------------------------------------


def value(field: str, item: Any) -> str:
    """A value as people write it: rates as 3.000e-05, ranges as A-B or A, nothing unprintable."""
    if item is None:
        return "nothing"
    if field == "skip" and isinstance(item, (list, tuple)):
        ends = [(first,) if first == last else (first, last) for first, last in item]
        return ", ".join("-".join(map(str, end)) for end in ends) or "none"
    if field == "rewarm" and isinstance(item, (list, tuple)) and len(item) == 3:
        return clean(f"{item[0]} to sample {item[2]}, from {item[1]}")
    if isinstance(item, (list, tuple)):
        return ", ".join(value(field, inner) for inner in item) or "none"
    if isinstance(item, float):
        return f"{item:.3e}" if field in RATES else number(item)
    text = clean(str(item))
    return text if len(text) <= 60 else f"{text[:57]}…"


def number(item: float) -> str:
    """The shortest text that reads back as the same float: 0.999, 1e-08, 2048."""
    short = f"{item:.6g}"
    return short if float(short) == item else repr(item)


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


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def size(number: float) -> str:
    """Bytes in decimal units."""
    if number < 1000:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:.1f} TB"
