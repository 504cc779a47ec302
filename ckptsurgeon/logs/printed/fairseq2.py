"""fairseq2's lines: `Train Metrics (step 6) - NLL Loss: 2.3 | Learning Rate: 0.0001`.

Source: `metrics/recorders/log.py`, `metrics/formatters.py` and
`recipe/composition/metric_recorders.py` of fairseq2 0.8.1, whose Trainer keeps the rate of an
update before its scheduler steps. Of several groups all rates are in the line, and each has a tag
of its own; the promise is of the largest, and the tag that is compared is the first.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, Number, quoted, significant

NAME = "fairseq2"
DIGITS = 6
HEAD = re.compile(r"(?:^|\s)Train Metrics \(step (?P<step>[\d,]+)\) - ")
VALUE = r"(?P<value>[-+]?[0-9.]+(?:e[-+]?\d+)?|nan|-?inf)\b"
RATES = re.compile(r"(?:^| \| )Learning Rate: (?P<rates>[-+.\w]+(?:, [-+.\w]+)*)")
LOSS = re.compile(rf"(?:^| \| )(?:\w+ )?Loss: {VALUE}")
NORM = re.compile(rf"(?:^| \| )Gradient Norm: {VALUE}")
SCALE = re.compile(rf"(?:^| \| )Loss Scale: {VALUE}")
POINTS = {"Learning Rate": "lr", "Loss Scale": "loss_scale"}
PREFIXES = {"Learning Rate (": "lr"}


def read(line: str) -> LoggedUpdate | None:
    """What a line says of one update; None for any other line."""
    plain = COLORS.sub("", line).rstrip()
    head = HEAD.search(plain)
    if head is None:
        return None
    rest = plain[head.end() :]
    loss, norm, scale = (_number(pattern, rest) for pattern in (LOSS, NORM, SCALE))
    return LoggedUpdate(
        NAME, quoted(line), step=int(head["step"].replace(",", "")), lr=_rate(rest), loss=loss,
        grad_norm=norm, loss_scale=scale,
    )  # fmt: skip


def _rate(text: str) -> Number | None:
    found = RATES.search(text)
    if found is None:
        return None
    try:
        rates = [significant(rate, DIGITS) for rate in found["rates"].split(", ")]
    except ValueError:
        return None
    return max(rates, key=lambda rate: rate.value)


def _number(pattern: re.Pattern[str], text: str) -> Number | None:
    found = pattern.search(text)
    return None if found is None else significant(found["value"], DIGITS)
