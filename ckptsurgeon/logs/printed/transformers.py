"""What the Hugging Face Trainer prints and saves: a dict a line, and `log_history` in its state.

Source: `transformers/trainer.py` (`_maybe_log_save_evaluate`) and `trainer_callback.py`
(`ProgressCallback.on_log`, `PrinterCallback.on_log`) of 5.23.0. A line names no step, only its
epoch. Release 5 prints four significant digits, in quotes, and reads the rate before the
scheduler's step: it is that of the update just made. Older releases print all digits, and the
oldest of them read it after; nothing in the line says which. ms-swift (`trainers/mixin.py` and
`patcher.py` of 4.6.0) reads it after the scheduler's step with any release, and names the step.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ckptsurgeon.logs import signals
from ckptsurgeon.logs.printed.stated import LoggedUpdate, Number, exact, quoted, significant

NAME = "the Hugging Face Trainer"
POINTS = {"train/learning_rate": "either_lr"}
SWIFT = "global_step/max_steps"
"""What ms-swift counts with: `5/10`."""
DIGITS = 4
MAX_LINE = 65536


def read(line: str) -> LoggedUpdate | None:
    """What a dict with a learning rate says; None for any other line."""
    start = line.find("{'")
    if start < 0 or "'learning_rate':" not in line or len(line) > MAX_LINE:
        return None
    try:
        entry = ast.literal_eval(line[start:].strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    rate = entry.get("learning_rate")
    text = quoted(line[start:])
    if (step := signals.number(entry.get(SWIFT))) is not None:
        told = _text(rate) if isinstance(rate, str) else _plain(rate)
        return LoggedUpdate(NAME, text, step=int(step), next_lr=told)
    if isinstance(rate, str):
        return LoggedUpdate(NAME, text, epoch=_text(entry.get("epoch")), lr=_text(rate))
    return LoggedUpdate(NAME, text, epoch=_epoch(entry.get("epoch")), either_lr=_plain(rate))


def history(document: Mapping[str, Any]) -> Iterator[LoggedUpdate]:
    """What `log_history` of a `trainer_state.json` says, oldest first."""
    entries = document.get("log_history")
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            continue
        if (rate := _plain(entry.get("learning_rate"))) is not None:
            yield LoggedUpdate(NAME, json.dumps(entry), step=entry["step"], either_lr=rate)


def _text(value: Any) -> Number | None:
    try:
        return significant(value, DIGITS)
    except (TypeError, ValueError):
        return None


def _plain(value: Any) -> Number | None:
    return exact(float(value)) if isinstance(value, (int, float)) else None


def _epoch(value: Any) -> Number | None:
    """Older releases round it to two decimals."""
    if not isinstance(value, (int, float)):
        return None
    short = round(value, 2) == value
    return Number(str(value), float(value), 0.005 if short else 0.0)
