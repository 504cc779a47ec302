"""Lines of names and numbers, of whatever trainer: `step 18/19560 | loss 9.65 | norm 2.18`.

nanoGPT, llm.c, modded-nanogpt and older releases of Megatron print such lines, each in its own way;
what they share is that a number stands behind its name, with a colon, an equals sign or a blank.
Dicts that the Hugging Face Trainer prints name no step: it is taken from the progress bar before
them, or they are counted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from ckptsurgeon.logs.printed.stated import COLORS

LOST = r"(?i:nan|inf(?:inity)?)"
NAME = rf"[A-Za-z_][\w./%-]*(?: (?!{LOST}\b)[A-Za-z_(][\w./%()-]*){{0,4}}"
VALUE = rf"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|{LOST}\b)"
PAIR = re.compile(rf"(?P<name>{NAME})\s*[:=]?\s*(?P<value>{VALUE})(?![\w.]*[A-DF-Zac-df-mo-z]\d)")
FIRST = re.compile(r"[^A-Za-z]*?(?<!\S)(\d+)/\d+[\s:|,]+(?=[A-Za-z_])")
BAR = re.compile(r"(\d+)/\d+ \[[^\]]*\]")
"""The count in a progress bar of tqdm."""
NOT_FINITE = re.compile(r"(?<=: )-?(?:nan|inf)(?=[,}])", re.IGNORECASE)
MAX_LINE = 65536


def pairs(line: str) -> dict[str, float]:
    """The numbers in a line by the names before them; of several under one name the first."""
    if len(line) > MAX_LINE:
        return {}
    found: dict[str, float] = {}
    for match in PAIR.finditer(COLORS.sub("", line)):
        found.setdefault(match["name"], float(match["value"]))
    return found


def entry(line: str) -> Mapping[str, object] | None:
    """The dict that a line ends with, as `print` writes one; None for any other line."""
    start = line.find("{'")
    if start < 0 or len(line) > MAX_LINE:
        return None
    try:
        found = ast.literal_eval(NOT_FINITE.sub(r"'\g<0>'", line[start:].strip()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def first_count(line: str) -> int | None:
    """How many of all a line says before its first word: `500/20000 train_loss: 3.3346`."""
    found = FIRST.match(COLORS.sub("", line[:MAX_LINE]))
    return None if found is None else int(found[1])


def counted(line: str) -> int | None:
    """Where a progress bar in the line stands."""
    bars = BAR.findall(line)
    return int(bars[-1]) if bars else None
