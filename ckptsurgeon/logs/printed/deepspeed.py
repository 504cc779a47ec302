"""DeepSpeed's own line: `step=10, skipped=0, lr=[0.001], mom=[(0.9, 0.95)]`.

Source: `_report_progress` in `deepspeed/runtime/engine.py`, 0.19.8, each `steps_per_print` steps.
It is called after the optimizer's and the scheduler's step: the rate and the betas are those of
the next update. The line of step 0 is from the engine's birth, before any load.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import LoggedUpdate, Number, exact, quoted

LINE = re.compile(
    r"\bstep=(?P<step>\d+), skipped=(?P<skipped>\d+), lr=\[(?P<lr>[^\]]*)\], mom=(?P<mom>.*)"
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d.]*(?:[eE][-+]?\d+)?")
NAME = "DeepSpeed"
POINTS: dict[str, str] = {}
"""Its monitor logs over samples alone (`Train/Samples/lr`), which name no update."""


def read(line: str) -> LoggedUpdate | None:
    """What the line says of the first param group; None for any other line, and for step 0."""
    match = LINE.search(line)
    if match is None or match["step"] == "0":
        return None
    rates = NUMBER.findall(match["lr"])
    return LoggedUpdate(
        NAME,
        quoted(line),
        step=int(match["step"]),
        next_lr=exact(rates[0]) if rates else None,
        betas=_betas(match["mom"]),
        skipped_total=int(match["skipped"]),
    )


def _betas(mom: str) -> tuple[Number, ...] | None:
    """Those of the first group; None where it is a momentum alone."""
    first = re.match(r"\[\s*[\[(](?P<betas>[^\])]*)[\])]", mom)
    return tuple(map(exact, NUMBER.findall(first["betas"]))) if first else None
