"""torchtitan's step line, which names no rate: that is in TensorBoard.

Source: `MetricsProcessor.log` in `torchtitan/components/metrics.py` and `train_step` in
`torchtitan/trainer.py` of pytorch/torchtitan at b5bcd76c. The rates are read before the update,
so a point of step N has the rate of update N. Printed for step 1 and each `log_freq` steps.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import COLORS, Stated, quoted

LINE = re.compile(r"(?:^|- )step: +(?P<step>\d+)  loss: ")
NAME = "torchtitan"
POINTS = {"lr": "lr"}
PREFIXES = {"lr/": "lr"}
"""Tags of several optimizers or groups begin so; the first one is compared."""


def read(line: str) -> Stated | None:
    """The step that was made; None for any other line."""
    match = LINE.search(COLORS.sub("", line))
    return None if match is None else Stated(NAME, quoted(line), step=int(match["step"]))
