"""The iteration line of Megatron-LM, Megatron-Bridge, Megatron-DeepSpeed and GPT-NeoX.

Source: `training_log` in `megatron/training/training.py` of NVIDIA/Megatron-LM at d98e8a64
(`.6E`), in `training/utils/train_utils.py` of megatron-bridge 0.6.2 (`.6E`), in
`megatron/training.py` of bigscience-workshop/Megatron-DeepSpeed at 8387ae17 and of Megatron-LM
before it (`.3E`), and in `megatron/logging.py` of EleutherAI/gpt-neox at ea7aefd8. All call it
after the update and after the scheduler's step: the line of iteration N has the counters after N,
and the rate and the loss scale of N + 1. Megatron prints a loss that is above 0, and no other:
where no iteration was skipped, a line without a loss is one of a loss that is no number.
"""

from __future__ import annotations

import re

from ckptsurgeon.logs.printed.stated import LoggedUpdate, Number, quoted, rounded

ITERATION = re.compile(r"\biteration\s+(?P<step>\d+)/\s*\d+ \|")
NUMBER = r"(?P<value>[-+0-9.Ee]+|(?i:-?nan|-?inf))"
RATE = re.compile(rf"\| learning rate: {NUMBER} \|")
SAMPLES = re.compile(r"\| consumed samples: +(?P<value>\d+) \|")
BATCH = re.compile(r"\| global batch size: +(?P<value>\d+) \|")
SCALE = re.compile(rf"\| loss scale: {NUMBER} \|")
LOSS = re.compile(rf"\| (?:lm[ _-])?loss: {NUMBER} \|")
NORM = re.compile(rf"\| grad norm: {NUMBER} \|")
SKIPPED = re.compile(r"\| number of skipped iterations: +(?P<value>\d+) \|")
ANY_LOSS = re.compile(r"loss(?! scale)")
NAME = "Megatron"
POINTS = {
    "learning-rate": "next_lr",
    "learning-rate/learning-rate": "next_lr",
    "steps-vs-samples/y=samples,x=steps": "consumed_samples",
    "batch-size": "batch_size",
    "batch-size/batch-size": "batch_size",
    "loss-scale": "loss_scale",
    "loss-scale/loss-scale": "loss_scale",
}
"""TensorBoard tag → what it says, of both; they are written in the same function."""


def read(line: str) -> LoggedUpdate | None:
    """What an iteration line says; None for any other."""
    head = ITERATION.search(line)
    if head is None:
        return None
    skipped = _number(SKIPPED, line)
    return LoggedUpdate(
        NAME,
        quoted(line),
        step=int(head["step"]),
        next_lr=_number(RATE, line),
        consumed_samples=_number(SAMPLES, line),
        batch_size=_number(BATCH, line),
        loss=_left_out(line, skipped) or _number(LOSS, line),
        grad_norm=_number(NORM, line),
        loss_scale=_number(SCALE, line),
        skipped=None if skipped is None else int(skipped.value),
    )


def _left_out(line: str, skipped: Number | None) -> Number | None:
    """NaN where a line has no loss, though its update was made."""
    made = skipped is not None and not skipped.value and NORM.search(line) is not None
    return rounded("nan") if made and ANY_LOSS.search(line) is None else None


def _number(pattern: re.Pattern[str], line: str) -> Number | None:
    match = pattern.search(line)
    return None if match is None else rounded(match["value"])
