"""nanotron's iteration line: `iteration: 7 / 100 | consumed_tokens: 1.2K | … | lr: 9.99e-05 | …`.

Source: `LoggerWriter` and `human_format` in `src/nanotron/logging/base.py`, `train_step_logs` in
`src/nanotron/trainer.py` of huggingface/nanotron at 2411b022; tests have the lines of 0.4.
`get_last_lr` is asked after the scheduler's step, so the line of iteration N has the rate of N + 1,
in three significant digits.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, quoted, significant

HEAD = re.compile(r"iteration: (?P<step>\d+) / \d+ \| ")
RATE = re.compile(r"\| lr: (?P<lr>[-+0-9.e]+)(?= \||\s*$)")
LOSS = re.compile(r"\| lm_loss: (?P<value>[-+0-9.e]+|nan|inf)(?= \||\s*$)")
NORM = re.compile(r"\| grad_norm: (?P<value>[-+0-9.e]+|nan|inf)(?= \||\s*$)")
NAME = "nanotron"
POINTS: dict[str, str] = {}


def read(line: str) -> LoggedUpdate | None:
    """What an iteration line says; None for any other."""
    plain = COLORS.sub("", line)
    head, rate = HEAD.search(plain), RATE.search(plain)
    if head is None:
        return None
    number = None if rate is None else significant(rate["lr"], 3)
    loss, norm = LOSS.search(plain), NORM.search(plain)
    return LoggedUpdate(
        NAME,
        quoted(line),
        step=int(head["step"]),
        next_lr=number,
        loss=None if loss is None else significant(loss["value"], 3),
        grad_norm=None if norm is None else significant(norm["value"], 3),
    )
