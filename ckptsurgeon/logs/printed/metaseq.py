"""metaseq's and fairseq's statistics of an update, after `| train_inner |`: JSON, or `key=value`
(`simple`, which fairseq prints to a file unless `--log-format` says otherwise). What `--log-file`
gets has nothing before them.

Source: `json_progress_bar.py`, `format_stat` (`{:g}`: six significant digits), `train_step` and
`lr_step_update` in `metaseq/trainer.py` of facebookresearch/metaseq at f7ffa5fd, which are
fairseq's (`logging/progress_bar.py`, 0.12.2). `lr` is computed from the number of updates just
made: it is the rate of the next one. The means of an epoch, after `| train |`, are not read: they
repeat the number of the last update.
"""

from __future__ import annotations

import json
import re

from ckptsurgeon.logs.printed.stated import LoggedUpdate, Number, quoted, significant

LINE = re.compile(
    r"(?:\| train_inner \| |^(?=\{\"epoch\": |epoch \d))"
    r"(?:(?P<json>\{.*\})|.*?:\s+\d+ / \d+ (?P<simple>.*?))\s*$"
)
PAIR = re.compile(r"(\w+)=([^\s,]+)")
NAME = "metaseq"
POINTS = {"lr": "next_lr", "loss_scale": "loss_scale"}


def read(line: str) -> LoggedUpdate | None:
    """What the statistics of an update say; None for any other line."""
    match = LINE.search(line)
    if match is None:
        return None
    try:
        stats = json.loads(match["json"]) if match["json"] else dict(PAIR.findall(match["simple"]))
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
