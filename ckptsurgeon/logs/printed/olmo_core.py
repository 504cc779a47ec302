"""OLMo-core's console: a line `[step=5/100,epoch=1,…]`, and indented lines of metrics below it.

Source: `train/callbacks/console_logger.py`, `format_float` in `utils.py` and `optim_step` in
`train/train_module/transformer/train_module.py` of allenai/OLMo-core at fa6c5014. The scheduler
sets the rate right before the update, so a metric of step N is the rate of update N.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, quoted, rounded

HEAD = re.compile(r"\[step=(?P<step>\d+)/[\d,?]+,epoch=\d+[^\]]*\]\s*$")
RATE = re.compile(r"^\s+optim/LR \(group 0\)=(?P<lr>[-+0-9.,E]+)\s*$")
METRIC = re.compile(
    r"^\s+(?P<name>train/CE loss|optim/total grad norm)=(?P<value>[-+0-9.,E]+|nan|inf)\s*$"
)
NAME = "OLMo-core"
POINTS = {"optim/LR (group 0)": "lr"}


def read(line: str) -> LoggedUpdate | None:
    """The step, or the rate of the step named above it; None for any other line."""
    plain = COLORS.sub("", line).rstrip("\n")
    if head := HEAD.search(plain):
        return LoggedUpdate(NAME, quoted(line), step=int(head["step"]), begins=True)
    if rate := RATE.match(plain):
        return LoggedUpdate(NAME, quoted(line), lr=rounded(rate["lr"]), continues=True)
    if metric := METRIC.match(plain):
        number = rounded(metric["value"])
        if metric["name"].startswith("train"):
            return LoggedUpdate(NAME, quoted(line), loss=number, continues=True)
        return LoggedUpdate(NAME, quoted(line), grad_norm=number, continues=True)
    return None
