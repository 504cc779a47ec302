"""metaseq's and fairseq's statistics of an update: JSON after `| train_inner |`.

Source: `json_progress_bar.py`, `format_stat` (`{:g}`: six significant digits), `train_step` and
`lr_step_update` in `metaseq/trainer.py` of facebookresearch/metaseq at f7ffa5fd. `lr` is computed
from the number of updates just made: it is the rate of the next one.
"""

from __future__ import annotations

import json
import re

from ckptsurgeon.logs.printed.stated import LoggedUpdate, Number, quoted, significant

LINE = re.compile(r"\| train(?:_inner)? \| (?P<json>\{.*\})\s*$")
NAME = "metaseq"
POINTS = {"lr": "next_lr", "loss_scale": "loss_scale"}


def read(line: str) -> LoggedUpdate | None:
    """What the statistics of an update say; None for any other line."""
    match = LINE.search(line)
    if match is None:
        return None
    try:
        stats = json.loads(match["json"])
        step = int(stats["num_updates"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return LoggedUpdate(
        NAME,
        quoted(line),
        step=step,
        next_lr=_number(stats.get("lr")),
        loss=_number(stats.get("loss")),
        grad_norm=_number(stats.get("gnorm")),
        loss_scale=_number(stats.get("loss_scale")),
    )


def _number(value: object) -> Number | None:
    try:
        return significant(str(value), 6)
    except ValueError:
        return None
