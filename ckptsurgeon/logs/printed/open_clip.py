"""open_clip's lines: `Train Epoch: 0 [ 64/128 (50%)] … LR: 0.000500 … Loss: 4.1589 (4.1589)`.

Source: `open_clip_train/train.py` (`train_one_epoch`) of open_clip_torch 3.3.0. A line counts the
samples of an epoch, of which each update takes as many and the last may be left out: it names no
update, and how many an epoch has the checkpoint says, or the first line of an epoch, which is of
its first update. The rate is that of the update. In TensorBoard its number is that of the update
before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptsurgeon.logs.printed.stated import COLORS, LoggedUpdate, Number, quoted, rounded

HEAD = re.compile(r"Train Epoch: (?P<epoch>\d+) \[ *(?P<seen>\d+)/(?P<of>\d+) \( *\d+%\)\] ")
NUMBER = r"(?P<value>[-+0-9.]+(?:e[-+]?\d+)?|nan|-?inf)(?=\s|$)"
RATE, LOSS = re.compile(rf"\sLR: {NUMBER}"), re.compile(rf"\sLoss: {NUMBER}")
NAME = "open_clip"
POINTS = {"train/lr": "lr"}
LATE = 1
"""What is added to the step of a point: see above."""
SMALL = 1e-6


def read(line: str) -> LoggedUpdate | None:
    """What a line says of one update, which is named by its epochs; None for any other line."""
    plain = COLORS.sub("", line).rstrip()
    head, rate, loss = HEAD.search(plain), RATE.search(plain), LOSS.search(plain)
    if head is None or rate is None or not 0 < int(head["seen"]) <= int(head["of"]):
        return None
    epochs = int(head["epoch"]) + int(head["seen"]) / int(head["of"])
    said = f"{head['epoch']} and {head['seen']}/{head['of']}"
    return LoggedUpdate(
        NAME,
        quoted(line),
        epoch=Number(said, epochs),
        lr=rounded(rate["value"]),
        loss=None if loss is None else rounded(loss["value"]),
    )


def numbered(statements: Sequence[LoggedUpdate]) -> Iterator[LoggedUpdate]:
    """The statements with the numbers of their updates, where nothing but they says how many an
    epoch has: of each epoch the first one is logged, and it has seen the fewest samples."""
    places = [each.epoch.value for each in statements if each.epoch is not None]
    first = min((place - math.ceil(place) + 1 for place in places), default=1.0)
    updates = math.floor(1 / first + SMALL)
    for each in statements:
        if each.epoch is not None:
            yield replace(each, step=math.ceil(each.epoch.value * updates - SMALL))
