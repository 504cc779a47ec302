"""What the numbers of a log count: where it has a saved step, as far as that is known.

A trainer that is known by name logs the numbers of its steps. Any other may log updates beside
steps that count epochs, or batches beside steps that count updates. Where a log ends tells: a log
that counts as the saved steps do ends with the newest of them, or before the next save.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ckptsurgeon.formats.layout import CountsSaves
from ckptsurgeon.hints import command
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run.run import Run

if TYPE_CHECKING:
    from ckptsurgeon.formats import Checkpoint
    from ckptsurgeon.logs.source import LogSource, Stream

UNWRITTEN, INTERVALS = 10, 4
"""Steps, and logged points, that may be missing at the end of a log: a writer of TensorBoard keeps
ten events in memory, which a killed job loses, and a step is saved between two points."""


def logged_at(run: Run, step: int, last: int, each: int = 1) -> int | None:
    """Where a log whose last point is at `last`, `each` steps after the one before it, has the
    saved `step`: at its number, or at the updates that it is after. None where the log ends with
    neither of the newest step. Two that end alike are not told apart, but by a page that says what
    is logged."""
    format, steps = run.format, run.steps()
    if not isinstance(format, CountsSaves) or not steps:
        return step
    if format.logs_counter:
        return format.updates(run.root, step)
    if _ends_with(steps, last, each):
        return step
    counts = [format.updates(run.root, saved) for saved in steps[-2:]]
    known = [count for count in counts if count is not None]
    if known and _ends_with(known, last, each):
        return format.updates(run.root, step)
    return None


def _ends_with(saved: Sequence[int], last: int, each: int) -> bool:
    """Whether a log that ends at `last` may count what the saved steps are, ascending, by these
    numbers: it ends no sooner than a killed writer's would, and before the next save."""
    newest = saved[-1]
    lost = min(max(UNWRITTEN, INTERVALS * each), max(newest - 1, 0) // 2)
    # Of a single step the next save is not known: half as many, or twice, are another count.
    beyond = max((b - a for a, b in pairwise(saved)), default=newest - 1 - max(lost, each))
    if saved[0] == 0:  # saves are counted from 0: a log that ends one later may count from 1
        beyond -= 1
    return newest - lost <= last <= newest + max(beyond, 0)


def counts_steps(run: Run, last: int, each: int = 1) -> bool:
    """Whether a log that ends so has each saved step at its number, as far as that is known."""
    newest = max(run.steps(), default=0)
    return logged_at(run, newest, last, each) == newest


def said_after(run: Run, step: int, said: int) -> int:
    """The number that the last update before the saved `step` has for a trainer that says `said` of
    a later one: that of the step, unless the updates of the newest one are nearer. 16-bit wrappers
    make one update more."""
    format = run.format
    if not isinstance(format, CountsSaves):
        return step
    updates, newest = format.updates(run.root, step), run.steps()[-1]
    if updates is None or updates <= step + 1:
        return step
    most = format.updates(run.root, newest) or updates
    return updates if said**2 >= max(newest, 1) * most else step


@frozen
class Tied:
    """The logs that have a step at a number that is known, each with it; and the others, by what
    they hold."""

    at: dict[LogSource, int]
    unknown: list[Stream]


def tied(run: Run, checkpoint: Checkpoint, sources: Sequence[LogSource], number: int) -> Tied:
    """Where each log has the step of `checkpoint`: at its `number`, for a trainer that is known and
    has one optimizer, as Lightning counts the updates of each and logs batches. Of any other the
    logs of one kind, which follow one another, end where the last of them does. What the optimizer
    alone counts is no place to cut: it leaves out updates that overflowed. Epochs are steps only
    where the steps may be epochs."""
    known = not isinstance(run.format, CountsSaves) and checkpoint.numbered
    streams = {each: each.streams() for each in sources if not known or each.counts_epochs()}
    found = Tied(dict.fromkeys((each for each in sources if each not in streams), number), [])
    ends: dict[str, Stream] = {}
    for stream in (stream for of in streams.values() for stream in of):
        other = ends.get(stream.kind)
        if stream.last is not None and (other is None or stream.last > (other.last or 0)):
            ends[stream.kind] = stream
    step = checkpoint.step
    own = run.format.counted(checkpoint) if isinstance(run.format, CountsSaves) else step
    exact = {step, own}
    places = {kind: _place(run, step, end.last or 0, end.each) for kind, end in ends.items()}
    for source, of in streams.items():
        at = next((places[stream.kind] for stream in of if stream.kind in places), number)
        epochs = source.counts_epochs() and (known or at != step)
        if all(stream.last is None for stream in of):
            found.at[source] = number
        elif at is None or at not in exact or epochs:
            found.unknown.extend(of)
        else:
            found.at[source] = at
    return found


def _place(run: Run, step: int, last: int, each: int) -> int | None:
    """Where a log that ends so has the step, also of a trainer that is known."""
    if isinstance(run.format, CountsSaves):
        return logged_at(run, step, last, each)
    return step if _ends_with(run.steps(), last, each) else None


def not_known(run: Run, logs: Sequence[Stream]) -> str:
    """What to know of logs that are not tied to the saved steps."""
    newest = run.steps()[-1]
    updates = run.format.updates(run.root, newest) if isinstance(run.format, CountsSaves) else None
    after = "" if updates in (None, newest) else f", after {updates} updates"
    names = ", ".join(f"{log.name} (up to {log.last})" for log in logs)
    its = "its" if len(logs) == 1 else "their"
    return f"{names}: not known what {its} numbers count, as step {newest} is the newest{after}"


def cutting(run: Run, step: int) -> str:
    """What cuts such logs at `step` all the same."""
    updates = run.format.updates(run.root, step) if isinstance(run.format, CountsSaves) else None
    cut = command("truncate-logs", "--after", "N" if updates is None else updates, real=True)
    return f"{cut} is for a log that counts {'what N counts' if updates is None else 'updates'}"
