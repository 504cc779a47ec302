"""The curves that a run's own logs hold: TensorBoard's, or the history that its trainer saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckptsurgeon.logs import curves, rows
from ckptsurgeon.logs.curves import Curves
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.run.run import Run

HISTORIES = ("trainer_state.json", "metrics.csv", "metrics.jsonl")
"""Files beside event files that hold curves, in the newest checkpoint or in the root."""


def own(
    run: Run,
    tags: Mapping[str, str],
    *,
    branch: Collection[str] = (),
    order: str | None = None,
) -> Curves:
    """The curves of the run's log folders; where these have no loss, those of a history that the
    newest step or the run's root holds. Raises SurgeryError when the lineage can't be proven."""
    read = curves.of_folders(run.logs.folders(), tags, branch=branch, order=order)
    if LOSS in read.kept:
        return read
    saved = run.steps()[-1:]
    for folder in [*(run.directory(step) for step in saved), run.root]:
        for name in HISTORIES:
            if (folder / name).is_file():
                other = rows.of_file(folder / name, tags)
                if LOSS in other.kept:
                    return other
    return read
