"""torchtitan's step line: loss and gradient norm, no rate. That is in TensorBoard.

Source: `MetricsProcessor.log` in `torchtitan/components/metrics.py` and `train_step` in
`torchtitan/trainer.py` of pytorch/torchtitan at b5bcd76c. The rates are read before the update,
so a point of step N has the rate of update N. Printed for step 1 and each `log_freq` steps.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, quoted, rounded

LINE = re.compile(
    r"(?:^|- )step: +(?P<step>\d+)  loss: +(?P<loss>[-+.\deE]+|nan|inf)"
    r"(?:  grad_norm: +(?P<norm>[-+.\deE]+|nan|inf))?"
)
NAME = "torchtitan"
POINTS = {"lr": "lr"}
PREFIXES = {"lr/": "lr"}
"""Tags of several optimizers or groups begin so; the first one is compared."""


def read(line: str) -> LoggedUpdate | None:
    """The step that was made; None for any other line."""
    match = LINE.search(COLORS.sub("", line))
    if match is None:
        return None
    norm = match["norm"]
    return LoggedUpdate(
        NAME,
        quoted(line),
        step=int(match["step"]),
        loss=rounded(match["loss"]),
        grad_norm=None if norm is None else rounded(norm),
    )
