"""MMEngine's lines, `Iter(train) [ 5/10]  lr: 8.5355e-05 …`, and the objects in its `vis_data/`.

Source: `runner/log_processor.py` and `hooks/logger_hook.py` of 0.10.7, whose hook logs before that
of the schedulers steps them: the rate is that of the update just made, in the line with four
digits behind the first. Where epochs are counted a line has the epoch and the batch in it.
"""

from __future__ import annotations

import json
import re

from ckptsurgeon.logs import signals
from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, exact, quoted, rounded

NAME = "MMEngine"
POINTS = {"lr": "lr"}
NUMBER = r"(?P<value>[-+]?[0-9.]+(?:e[-+]?\d+)?)"
HEAD = re.compile(
    r"(?:Iter\(train\) +\[ *(?P<step>\d+)/\d+\]"
    r"|Epoch\(train\) +\[ *(?P<epoch>\d+)\]\[ *(?P<batch>\d+)/(?P<of>\d+)\])  "
)
RATE, LOSS, NORM = (
    re.compile(rf"(?: |^){name}: {NUMBER}(?: |$)") for name in ("lr", "loss", "grad_norm")
)


def read(line: str) -> LoggedUpdate | None:
    """What a line of training says, or an object of a log; None for any other."""
    plain = COLORS.sub("", line).rstrip()
    if plain.startswith('{"') and '"iter": ' in plain:
        return _object(plain)
    head = HEAD.search(plain)
    if head is None:
        return None
    step = head["step"] or (int(head["epoch"]) - 1) * int(head["of"]) + int(head["batch"])
    rate, loss, norm = (pattern.search(plain, head.end() - 1) for pattern in (RATE, LOSS, NORM))
    return LoggedUpdate(
        NAME,
        quoted(line),
        step=int(step),
        lr=rounded(rate["value"]) if rate else None,
        loss=rounded(loss["value"]) if loss else None,
        grad_norm=rounded(norm["value"]) if norm else None,
    )


def _object(line: str) -> LoggedUpdate | None:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return None
    rate, step = signals.number(item.get("lr")), signals.number(item.get("iter"))
    if rate is None or step is None:
        return None
    return LoggedUpdate(NAME, quoted(line), step=int(step), lr=exact(rate))
