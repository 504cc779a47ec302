"""Where the run stands: consumed samples, tokens, iteration, and the batches that move them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Checkpoint
from ckptsurgeon.hints import command
from ckptsurgeon.operations.place_changes import of_settings
from ckptsurgeon.operations.section import Changes
from ckptsurgeon.plans.edits import AnyChange
from ckptsurgeon.run.run import Run

COUNTERS = ("consumed_samples", "tokens", "iteration", "data_epoch", "data_batches")


def counter_changes(
    run: Run, checkpoint: Checkpoint, counters: Mapping[str, Any], moved: bool
) -> Changes:
    """Changes that set these counters, wherever they are kept.

    Only the counters: the schedule keeps its own, so the learning rate stays where it is.
    `moved` says that the same recipe sets the schedule's, too. Raises UsageError for two counters
    that are one number and would be two."""
    changes: list[AnyChange] = []
    typed: dict[tuple[Any, ...], tuple[str, Any]] = {}
    warnings: list[str] = []
    data = checkpoint.state().data if "consumed_samples" in counters else ""
    if data:
        raise SurgeryError(data, next=command("show", why="what is kept of the data"))
    for key, value in counters.items():
        settings, notes = checkpoint.recount(key, value)
        if not settings:
            raise SurgeryError(
                f"{checkpoint.path.name} keeps no {key}: its trainer counts it elsewhere",
                next=command("show", why="what it keeps"),
            )
        warnings += [note for note in notes if note not in warnings]
        for field, place, new in settings:
            if field != key:  # what follows from it
                continue
            other, known = typed.setdefault((place.file, place.path), (key, new))
            if known != new:
                raise UsageError(
                    f"{other} and {key} are one number in {place.file.name}, and can't be {known} "
                    f"and {new}",
                    next=f"set {other} alone, or both to one value",
                )
        changes += of_settings(run, settings)
    schedule = checkpoint.state().schedule or {}
    if "consumed_samples" in counters and "num_steps" in schedule and not moved:
        warnings.append(f"the schedule stays at sample {schedule['num_steps']}")
    if "iteration" in counters and counters["iteration"] != checkpoint.step:
        warnings.append(
            f"the folder keeps its name {checkpoint.path.name}, and the next step is number "
            f"{counters['iteration'] + 1}"
        )
    return changes, warnings
