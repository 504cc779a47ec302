"""verl's console: `step:5 - actor/pg_loss:0.1 - actor/lr:1e-06`, behind what Ray puts before it.

Source: `concat_dict_to_str` in `utils/logger/aggregate_logger.py` and `lr_scheduler_step` in
`workers/engine/fsdp/transformer_impl.py` of verl 0.9.1, whose rate is that of the next update; in
older releases the workers asked for it before the scheduler's step. A policy's loss says nothing
of how well it does and is not read; that of a supervised run, `train/loss`, is.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, Number, exact, quoted

HEAD = re.compile(r"(?:^|\s)step:(?P<step>\d+) - ")
VALUE = r"(?:np\.float\d+\()?(?P<value>[-+]?[0-9.]+(?:e[-+]?\d+)?|nan|-?inf)\b"
RATE = re.compile(rf" - (?:actor|train)/lr:{VALUE}")
LOSS = re.compile(rf" - train/loss:{VALUE}")
NORM = re.compile(rf" - (?:actor|train)/grad_norm:{VALUE}")
NAME = "verl"
POINTS = {"actor/lr": "either_lr", "train/lr": "either_lr"}


def read(line: str) -> LoggedUpdate | None:
    """What a line says of one update; None for any other line."""
    plain = COLORS.sub("", line).rstrip()
    head = HEAD.search(plain)
    if head is None:
        return None
    rest = plain[head.end() - len(" - ") :]
    rate, loss, norm = (_number(pattern, rest) for pattern in (RATE, LOSS, NORM))
    return LoggedUpdate(
        NAME, quoted(line), step=int(head["step"]), either_lr=rate, loss=loss, grad_norm=norm
    )


def _number(pattern: re.Pattern[str], text: str) -> Number | None:
    found = pattern.search(text)
    return None if found is None else exact(found["value"])
