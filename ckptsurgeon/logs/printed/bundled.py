"""The iteration line of the bundled trainer: Megatron's form, with the rate of its own update.

Source: `train/log.py` (`loss_line`), `train/trainer.py` (`iteration` reads lr before the step).
"""

from __future__ import annotations

from dataclasses import replace

from ckptsurgeon.logs.printed import megatron
from ckptsurgeon.logs.printed.stated import LoggedUpdate

NAME = "the bundled trainer"
POINTS = {tag: "lr" if field == "next_lr" else field for tag, field in megatron.POINTS.items()}


def read(line: str) -> LoggedUpdate | None:
    """What an iteration line says; None for any other."""
    statement = megatron.read(line)
    return (
        None
        if statement is None
        else replace(statement, family=NAME, lr=statement.next_lr, next_lr=None)
    )
