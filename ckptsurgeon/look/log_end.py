"""Logs that end before the checkpoint that the trainer resumes. Reads only."""

from __future__ import annotations

from ckptsurgeon.hints import Hint, command
from ckptsurgeon.logs.curves import Branch
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import changed, standing

UNWRITTEN, INTERVALS = 10, 4
"""Steps, and logged points, that may be missing at the end of the logs: a writer of TensorBoard
keeps ten events in memory, which a killed job loses, and a step is saved between two points."""


def early(run: Run, step: int, kept: Branch) -> list[Finding]:
    """Logs that end long before the step that the trainer resumes. Nothing is said while a trainer
    runs, which has events in memory, nor where logs and steps may count different things: no step
    is saved in what was logged, or a surgery changed the iteration."""
    if LOSS not in kept or run.writers() or changed(run.receipts(), ("iteration",)):
        return []
    steps = kept[LOSS].steps
    last, each = int(steps[-1]), max((int(steps[-1] - steps[0]) // max(1, len(steps) - 1)), 1)
    if step - last <= max(UNWRITTEN, INTERVALS * each) or run.steps()[0] > last:
        return []
    cut = [r.id for r in standing(run.receipts()) if "after" in (r.recipe.get("tensorboard") or {})]
    next: Hint = "name the folder that it logs to now in `tensorboard:` of ckptsurgeon.yaml"
    if cut:
        next = command("undo", cut[-1], why="brings back what this surgery cut off the logs")
    return [Finding(f"the logs end at step {last}, before the checkpoint of step {step}", next)]
