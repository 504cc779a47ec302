"""What one line or one logged point of a trainer says, each number with the precision it has."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from decimal import Decimal

from ckptsurgeon.plans.frozen import frozen

SAME = 1e-7
"""Relative: two numbers that differ by less are one. TensorBoard keeps float32, whose rounding is
6e-8, and a schedule that multiplies step by step drifts by less."""
COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@frozen
class Number:
    """A number as it was said: `half` is half of the last unit that is meant, 0 where all digits
    are."""

    text: str
    value: float
    half: float = 0.0

    def agrees(self, promised: float) -> bool:
        """Whether `promised`, rounded as this number was, is this number."""
        if not math.isfinite(self.value):
            return False
        slack = SAME * max(abs(promised), abs(self.value))
        return abs(promised - self.value) <= self.half + slack

    def __str__(self) -> str:
        return self.text


def rounded(text: str) -> Number:
    """A number that was printed with a fixed count of digits: the last one is rounded."""
    plain = text.replace(",", "")
    exponent = Decimal(plain).as_tuple().exponent
    half = 10.0**exponent / 2 if isinstance(exponent, int) else 0.0
    return Number(text, float(plain), half)


def significant(text: str, digits: int) -> Number:
    """A number of so many significant digits, whose trailing zeros were left out (`%g`)."""
    value = float(text)
    if value == 0 or not math.isfinite(value):
        return Number(text, value)
    return Number(text, value, 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1) / 2)


def exact(value: float | str) -> Number:
    """A number that was written in full."""
    return Number(f"{value}" if isinstance(value, str) else f"{value:.9g}", float(value))


@frozen
class LoggedUpdate:
    """What one line, or the logged points of one step, say; None is what they do not say.

    `step` is the number of the update that was just made: the promise of a checkpoint of step N is
    for N + 1. `lr` is the rate of that update, `next_lr` that of the one after it; trainers differ
    in which they print. `either_lr` is one of the two, where releases of one library differ.
    `consumed_samples` counts that update's;
    `loss` and `grad_norm` are of its batch; `loss_scale` is what it left. `skipped` are updates
    since the line before that overflowed, `skipped_total` those of the whole run. Of a statement on
    several lines the first one `begins` it, and each other one `continues` it."""

    family: str
    text: str
    step: int | None = None
    epoch: Number | None = None
    lr: Number | None = None
    next_lr: Number | None = None
    either_lr: Number | None = None
    consumed_samples: Number | None = None
    batch_size: Number | None = None
    loss: Number | None = None
    grad_norm: Number | None = None
    loss_scale: Number | None = None
    betas: tuple[Number, ...] | None = None
    skipped: int | None = None
    skipped_total: int | None = None
    begins: bool = False
    continues: bool = False

    @property
    def some_lr(self) -> Number | None:
        """The rate that it says, of whichever update."""
        return self.lr or self.next_lr or self.either_lr

    def joined(self, other: LoggedUpdate) -> LoggedUpdate:
        """This line with what `other`, which continues it, says too."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, value in values.items():
            if value is None:
                values[name] = getattr(other, name)
        return LoggedUpdate(**{**values, "text": f"{self.text} {other.text}", "begins": False})


def quoted(line: str) -> str:
    """A line as it is shown: without colours, its runs of blanks one each."""
    return " ".join(COLORS.sub("", line).split())
