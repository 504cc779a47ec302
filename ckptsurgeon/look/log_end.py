"""Logs that end before the checkpoint that the trainer resumes, or apart. Reads only."""

from __future__ import annotations

from ckptsurgeon.formats.layout import CountsSaves
from ckptsurgeon.hints import Hint, command
from ckptsurgeon.logs.curves import Branch
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.logs.source import Stream
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.run.log_numbers import INTERVALS, UNWRITTEN
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import changed, standing

KEYS = ("tensorboard", "logs")
"""Sections of a recipe that cut logs."""


def early(run: Run, step: int, kept: Branch) -> list[Finding]:
    """Logs that end long before the step that the trainer resumes. Nothing is said while a trainer
    runs, which has events in memory, nor where logs and steps may count different things: no step
    is saved in what was logged, or a surgery changed the iteration."""
    if LOSS not in kept or run.writers() or changed(run.receipts(), ("iteration",)):
        return []
    if isinstance(run.format, CountsSaves):
        return []
    steps = kept[LOSS].steps
    last, each = int(steps[-1]), kept[LOSS].spacing
    if step - last <= max(UNWRITTEN, INTERVALS * each) or run.steps()[0] > last:
        return []
    own = [(r.id, r.recipe.get(key) or {}) for r in standing(run.receipts()) for key in KEYS]
    cut = [id for id, section in own if "after" in section]
    next: Hint = "name the folder that it logs to now in `tensorboard:` of ckptsurgeon.yaml"
    if cut:
        next = command("undo", cut[-1], why="brings back what this surgery cut off the logs")
    return [Finding(f"the logs end at step {last}, before the checkpoint of step {step}", next)]


def apart(run: Run, step: int) -> list[Finding]:
    """Logs of one training that end at different steps: an earlier surgery, or somebody's hand, cut
    one of them and not the others. Nothing is said while a trainer runs, whose writers hold points
    in memory, nor of a trainer whose logs may count different things."""
    if isinstance(run.format, CountsSaves):
        return []
    ends: dict[str, Stream] = {}
    for source in (each for each in run.log_sources() if not each.counts_epochs()):
        for stream in source.streams():
            known = ends.get(stream.kind)
            if stream.last is not None and (known is None or stream.last > (known.last or 0)):
                ends[stream.kind] = stream
    if len(ends) < 2 or run.writers():
        return []
    inorder = sorted(ends.values(), key=lambda stream: stream.last or 0)
    first, last = inorder[0], inorder[-1]
    far = max(UNWRITTEN, INTERVALS * max(stream.each for stream in inorder))
    if (last.last or 0) - (first.last or 0) <= far:
        return []
    next: Hint = f"{first.name}: find out why its writer stopped; nothing needs to be cut"
    if (first.last or 0) <= step + far < (last.last or 0):
        next = command("truncate-logs", "--after", step, why="cuts them all at the checkpoint")
    listed = ", ".join(f"{stream.name} at {stream.last}" for stream in inorder)
    return [Finding(f"the logs end at different steps: {listed}", next)]
