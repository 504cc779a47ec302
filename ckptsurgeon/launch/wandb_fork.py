"""What a trainer is told so that its run of W&B goes on from the step that was rolled back to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs.wandb.offline_run import FORK, ID, RESUME, OfflineRun
from ckptsurgeon.operations.events import marks_of
from ckptsurgeon.operations.rollback import Rollback
from ckptsurgeon.run.run import Run
from ckptsurgeon.transaction.receipts import standing

READERS = ("torchtitan",)
"""Formats whose trainer passes these variables to `wandb.init`, and neither a run nor `resume` of
its own, beside which W&B refuses them (torchtitan 0.3, components/metrics.py)."""
OTHERS = ("WANDB_RESUME", FORK, RESUME)
"""Whoever sets one of these has decided."""
NOT_SENT = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE with which nothing can be forked, as no server is asked."""


def variables(run: Run, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for the start of a trainer that reads them, where the newest run of W&B was rolled
    back and a server has points of it that no surgery can take away: the start forks it at the
    step, or goes on in it where the environment that is `given` names it as the run to use."""
    if run.format.name not in READERS or any(given.get(name) for name in OTHERS):
        return {}
    runs = [source for source in run.log_sources() if isinstance(source, OfflineRun)]
    back = [r for r in standing(run.receipts()) if Rollback.key in r.recipe]
    if not runs or not back or given.get("WANDB_MODE") in NOT_SENT:
        return {}
    newest = max(runs, key=lambda source: source.path.stat().st_mtime)
    rolled_back = datetime.fromisoformat(back[-1].when).timestamp() + 1  # it has whole seconds
    if newest.path.stat().st_mtime > rolled_back:
        return {}  # it was begun since, and goes on
    try:
        checkpoint = run.checkpoint(run.latest())
        step = newest.goes_on_from(marks_of(checkpoint, checkpoint.step, None))
    except SurgeryError:  # nothing proves which of its points lead to the step
        return {}
    if step is None or step < 0:
        return {}
    return {RESUME if given.get(ID) == newest.id else FORK: f"{newest.id}?_step={step}"}
