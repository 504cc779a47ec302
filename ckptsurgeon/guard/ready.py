"""Before a start: what it loads, once nobody works on the run, and what repairs it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.one_look import look_again
from ckptsurgeon.look.ready import Readiness, shadows
from ckptsurgeon.look.ready import ready as look
from ckptsurgeon.transaction.receipts import next_id

if TYPE_CHECKING:
    from ckptsurgeon.operations.section import Recipe
    from ckptsurgeon.progress import Progress
    from ckptsurgeon.run.run import Run

PAUSE_S = 0.05
"""How often to look whether a surgery has ended."""


def decide(
    run: Run,
    level: int,
    *,
    repair: bool = False,
    from_scratch: bool = False,
    wait: float = 0,
    jobs: int = 8,
    allow_globals: Collection[str] = (),
    progress: Progress | None = None,
) -> Readiness:
    """What the next start loads, once nobody works on the run; `repair` mends it before. Of several
    processes one repairs: the others wait for its lock, and look at the one step that it led to.

    Raises SurgeryError where a repair is refused or the lock is held for longer than `wait`."""
    end = time.monotonic() + wait
    while True:
        while run.under_way() and time.monotonic() < end:
            time.sleep(PAUSE_S)
        look_again()
        before = next_id(run.root)
        refused = None
        try:
            if repair and run.interrupted():
                from ckptsurgeon.surgery import recover

                recover(run)
                before = next_id(run.root)
            seen = look(run, level=level, from_scratch=from_scratch, jobs=jobs, progress=progress)
            if repair and seen.sound is not None:
                seen = _repaired(run, seen, jobs, allow_globals)
            if seen.ready or seen.receipt is not None:
                return seen
        except SurgeryError as error:
            refused = error
        meanwhile = run.under_way() is not None or next_id(run.root) != before
        if meanwhile and time.monotonic() < end:
            continue  # another process changed what was looked at
        if refused is not None:
            raise refused
        return seen


def _repaired(run: Run, seen: Readiness, jobs: int, allow_globals: Collection[str]) -> Readiness:
    """What is there after the surgery; `seen` where none would help."""
    from ckptsurgeon.surgery import apply, plan

    recipe = _recipe(run, seen)
    wanted = None if recipe is None else plan(run, recipe, allow_globals=allow_globals)
    if wanted is None or wanted.empty:
        return seen
    receipt = apply(run, wanted, jobs=jobs)
    look_again()
    return replace(look(run, level=seen.level, jobs=jobs), receipt=receipt.id)


def _recipe(run: Run, seen: Readiness) -> Recipe | None:
    """The pointers name the sound step. Without pointers, where they do not lead past a newer step,
    and where a mark keeps that step from being loaded, what is in the way goes to the attic; the
    logs stay as they are. What is newer and lies outside the run's own steps is a person's to
    judge."""
    from ckptsurgeon.operations.events import TensorBoard
    from ckptsurgeon.operations.rollback import Repair, Rollback
    from ckptsurgeon.operations.section import Recipe

    assert seen.sound is not None
    ahead = [step for step in run.steps() if step > seen.sound]
    others = shadows(run, seen.sound)
    marked = bool(others) and not ahead and all(each.step <= seen.sound for each in others)
    newer = {path for step in ahead for path in run.entries(step)}
    taken = bool(others) and all(each.paths and newer.issuperset(each.paths) for each in others)
    if seen.sound == seen.step and not (marked or taken):
        return None  # its bytes are sound, and something else is wrong
    why = f"ready: {seen.found[0].what}"
    if marked or taken or not run.format.pointers(run.root, seen.sound):
        return Recipe(Rollback(seen.sound), TensorBoard(truncate=False), why=why)
    return Recipe(Repair(seen.sound), why=why)
