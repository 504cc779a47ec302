"""Lines, objects and tags of a loop of one's own: `step 7 loss 2.1 lr 3.00e-04`, `train/lr`.

They are read by the names before their numbers. Such loops ask for the rate before the scheduler's
step or after it, so a rate is that of the update that the line names or of the next one; and they
count from 1 or from 0, see `from_one`. A rate of one digit is left out: `0.001` may be in full, or
rounded to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptsurgeon.logs import signals
from ckptsurgeon.logs.printed.pairs import MAX_LINE, PAIR, first_count
from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, quoted, rounded

NAME = "lines of a step and an lr"
POINTS: Mapping[str, str] = dict.fromkeys(signals.NAMES[signals.LR], "either_lr")
RATES = frozenset(map(signals.plain, POINTS))


def read(line: str) -> LoggedUpdate | None:
    """What a line says that names a step and a rate; None for any other."""
    plain = COLORS.sub("", line)
    if len(plain) > MAX_LINE:
        return None
    found = _object(plain) or {}
    for match in () if found else PAIR.finditer(plain):
        found.setdefault(match["name"], match["value"])
    rate = next((text for name, text in found.items() if _is_rate(name)), None)
    at = signals.step_name(found, None)
    step = first_count(plain) if at is None else signals.number(found[at])
    if rate is None or step is None or step != int(step) or len(_digits(rate)) < 2:
        return None
    return LoggedUpdate(NAME, quoted(line), step=int(step), either_lr=rounded(rate))


def from_one(statements: Sequence[LoggedUpdate], last: int) -> list[LoggedUpdate]:
    """The statements with steps that count from 1. A loop counts from 0 that has a step 0, or that
    begins again at the very number `last`, where the checkpoint ends."""
    steps = [statement.step or 0 for statement in statements]
    back = [i for i in range(1, len(steps)) if steps[i] <= steps[i - 1]]
    if steps and (0 in steps or steps[back[-1] if back else 0] == last):
        return [replace(each, step=step + 1) for each, step in zip(statements, steps, strict=True)]
    return list(statements)


def _is_rate(name: str) -> bool:
    plain = signals.plain(name)
    return plain in RATES or plain.rpartition("_")[2] == "lr"


def _digits(number: str) -> str:
    """The significant digits that were written."""
    return number.lower().partition("e")[0].replace(".", "").lstrip("+-0")


def _object(line: str) -> dict[str, str] | None:
    """The numbers of an object of JSON, as they are written there."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        item = json.loads(line, parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return None
    pairs = item.items() if isinstance(item, dict) else ()
    return {k: v for k, v in pairs if isinstance(v, str) and signals.number(v) is not None}
