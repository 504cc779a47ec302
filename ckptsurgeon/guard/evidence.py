"""What a watch leaves for a person: the curves' verdict, the recipe, its plan, a picture; and the
word that it sends."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from ckptsurgeon import disk, report, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.guard import event as events
from ckptsurgeon.guard.event import Event
from ckptsurgeon.guard.policy import Policy
from ckptsurgeon.guard.proposal import first, proposal
from ckptsurgeon.hints import command
from ckptsurgeon.look.advise.advice import advise
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.advice import Proposal, advice_json, recipe_file
from ckptsurgeon.report.document import SCHEMA
from ckptsurgeon.run.run import Run

if TYPE_CHECKING:
    from ckptsurgeon.logs.curves import Curves
    from ckptsurgeon.look.advise.advice import Advice

RECIPE = "recipe.yaml"
NOTIFY_S = 60
"""Seconds that the command has which tells a person."""


def gather(run: Run, curves: Curves, id: str) -> tuple[Advice, Proposal | None]:
    """The verdict on the curves and the first recipe that `plan` accepts; both are kept with the
    event, the plan of the recipe and, where matplotlib is installed, a picture of the run, too."""
    diagnosis = advise(curves, run)
    proposals = [proposal(run, each) for each in diagnosis.remedies]
    chosen = first(proposals)
    document = advice_json(diagnosis, proposals, str(run.root))
    events.put(run.root, id, "advice.json", json.dumps(document, ensure_ascii=False).encode())
    if chosen is not None and chosen.recipe is not None:
        events.put(run.root, id, RECIPE, recipe_file(chosen, diagnosis).encode())
        planned = surgery.plan(run, from_data(chosen.recipe))
        shown = report.plan(planned, run.name, report.Style())
        events.put(run.root, id, "plan.txt", f"{shown}\n".encode())
    picture = _picture(run, curves)
    if picture is not None:
        events.put(run.root, id, "picture.svg", picture)
    return diagnosis, chosen


def _picture(run: Run, curves: Curves) -> bytes | None:
    from ckptsurgeon.look.timeline import timeline_of
    from ckptsurgeon.report.picture import draw
    from ckptsurgeon.report.picture.theme import LIGHT

    try:
        return draw(timeline_of(curves, run, None), "svg", "steps", LIGHT)
    except SurgeryError:  # it is not installed
        return None


def document(run: Run, event: Event) -> dict[str, Any]:
    """What `notify` gets on its stdin."""
    return {
        "schema": SCHEMA,
        "run": str(run.root),
        "name": run.name,
        "event": events.as_json(event, run.root),
        "next": str(next_command(run, event)),
    }


def next_command(run: Run, event: Event) -> object:
    """What a person would type first."""
    recipe = events.folder(run.root, event.id) / RECIPE
    if disk.is_file(recipe) and event.receipt is None:
        return command("apply", recipe, run=run.root)
    return command("status", run=run.root)


def notify(run: Run, policy: Policy, event: Event) -> str:
    """Tell a person; empty once that is done, or nobody is to be told, else why it is not."""
    if not policy.notify:
        return ""
    try:
        done = subprocess.run(
            policy.notify,
            input=json.dumps(document(run, event), ensure_ascii=False).encode(),
            timeout=NOTIFY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{policy.notify[0]}: {error}"
    return f"{policy.notify[0]} ended with {done.returncode}" if done.returncode else ""
