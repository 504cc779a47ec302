"""What the numbers of a log count: where it has a saved step, as far as that is known.

A trainer that is known by name logs the numbers of its steps. Any other may log updates beside
steps that count epochs, or batches beside steps that count updates. Where a log ends tells: a log
that counts as the saved steps do ends with the newest of them, or before the next save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from typing import TYPE_CHECKING

from ckptsurgeon.errors import count
from ckptsurgeon.formats.layout import CountsSaves
from ckptsurgeon.hints import Command, command
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run.run import Run

if TYPE_CHECKING:
    from ckptsurgeon.formats import Checkpoint
    from ckptsurgeon.logs.source import Counted, Kind, LogSource, Stream

UNWRITTEN, INTERVALS = 10, 4
"""Steps, and logged points, that may be missing at the end of a log: a writer of TensorBoard keeps
ten events in memory, which a killed job loses, and a step is saved between two points."""
SAVES = 32
"""Saved steps, the newest, whose times are compared with those of the points."""


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
class Place:
    """Where a log has a step: at the number `step`, and its last point that leads there at `last`;
    of tags that count something else, by their clock, at the number in `clocks`."""

    step: int
    last: int
    clocks: Mapping[tuple[str, ...], int] = field(default_factory=dict)


@frozen
class Tied:
    """The logs that have a step at a number that is known; the others, by what they hold; and
    those whose point of that number may be of the next update."""

    at: dict[LogSource, Place]
    unknown: list[Stream]
    doubtful: list[Stream]


def tied(run: Run, checkpoint: Checkpoint, sources: Sequence[LogSource], number: int) -> Tied:
    """Where each log has the step of `checkpoint`: at its `number`, for a trainer that is known and
    has one optimizer, as Lightning counts the updates of each and logs batches. Of any other the
    logs of one kind, which follow one another, end where the last of them does. What the optimizer
    alone counts is no place to cut: it leaves out updates that overflowed. Epochs are steps only
    where the steps may be epochs."""
    known = not isinstance(run.format, CountsSaves) and checkpoint.numbered
    said = run.logs.offset()
    found, step, own = Tied({}, [], []), checkpoint.step, checkpoint.state().step
    if isinstance(run.format, CountsSaves):
        own = run.format.counted(checkpoint)
    logs: dict[LogSource, list[Counted]] = {}
    kinds: dict[Kind, list[Counted]] = {}
    for source in sources:
        counted = source.counted() if not known or source.counts_epochs() else []
        logs[source] = [log for log in counted if log.stream.last is not None]
        for log in logs[source]:
            kinds.setdefault(log.kind, []).append(log)
    places: dict[Kind, tuple[int, int | None]] = {}
    for kind, alike in kinds.items():
        at = _place(run, step, alike, said or 0)
        if at is not None and at in (step, own):
            asked = said is None and not known
            places[kind] = at, _offset(run, alike, at, step) if asked else said or 0
    for source, counted in logs.items():
        epochs = source.counts_epochs()
        tie = {log.kind: places[log.kind] for log in counted if log.kind in places}
        if epochs and (known or any(at != step for at, _ in tie.values())):
            tie = {}
        found.unknown.extend(log.stream for log in counted if log.kind not in tie)
        if counted and not tie:
            continue
        at, offset = next(iter(tie.values()), (number, said or 0))
        clocks = {clock: at + (offset or 0) for (_, clock), (at, offset) in tie.items() if clock}
        found.at[source] = Place(at, at + (offset or 0), clocks)
        found.doubtful.extend(log.stream for log in counted if tie.get(log.kind, (0, 0))[1] is None)
    return found


def _place(run: Run, step: int, logs: Sequence[Counted], offset: int) -> int | None:
    """Where logs that follow one another have the step, also of a trainer that is known."""
    end = max((log.stream for log in logs), key=lambda stream: stream.last or 0)
    last = (end.last or 0) - offset
    if isinstance(run.format, CountsSaves):
        return logged_at(run, step, last, end.each)
    return step if _ends_with(run.steps(), last, end.each) else None


def _offset(run: Run, logs: Sequence[Counted], at: int | None, step: int) -> int | None:
    """What is added to the number `at` of the step in such logs: -1 where they call the first
    update 0. None where the point there may be of the step or of the next update."""
    from ckptsurgeon.logs.origin import first_update, joined

    points, steps = joined([log.points for log in logs]), run.steps()
    apart = min((b - a for a, b in pairwise(steps)), default=0)
    if at is None or at not in points.steps or (steps[0] == 0 and apart == points.each):
        return 0  # a save at each point, and both counted from 0, are counted alike
    saves = {}
    for saved in steps[-SAVES:]:
        number = saved if at == step else logged_at(run, saved, int(points.steps.max()))
        if number is not None:
            files = run.format.files(run.root, saved)
            saves[number] = max((path.stat().st_mtime for path in files), default=0.0)
    first = first_update(points, saves)
    return None if first is None else first - 1


def not_known(run: Run, logs: Sequence[Stream]) -> str:
    """What to know of logs that are not tied to the saved steps."""
    newest = run.steps()[-1]
    updates = run.format.updates(run.root, newest) if isinstance(run.format, CountsSaves) else None
    after = "" if updates in (None, newest) else f", after {count(updates, 'update')}"
    names = ", ".join(f"{log.name} (up to {log.last})" for log in logs)
    its = "its" if len(logs) == 1 else "their"
    return f"{names}: not known what {its} numbers count, as step {newest} is the newest{after}"


def doubtful(step: int, logs: Sequence[Stream]) -> str:
    """What to know of logs that may call the first update 0, and what cuts them then."""
    names = ", ".join(dict.fromkeys(log.name for log in logs))
    number = "its number" if len(logs) == 1 else "their number"
    return (
        f"{names}: not known whether the point at {number} of step {step} is of that step or of "
        "the update after it, so it stays; log_offset in ckptsurgeon.yaml says it: -1 where the "
        "first update is 0, 0 where it is 1"
    )


def cutting(run: Run, step: int) -> str:
    """What cuts such logs at `step` all the same. The optimizer may count fewer updates than steps,
    as it leaves out those that overflowed."""
    updates = run.format.updates(run.root, step) if isinstance(run.format, CountsSaves) else None
    if updates is None:
        return f"{_cut('N')} is for a log that counts what N counts"
    if updates == step:
        return f"{_cut(step)} is for a log that counts updates"
    both = f"{_cut(updates)} is for a log that counts updates"
    return f"{both}, {_cut(step)} for one that counts what the steps do"


def _cut(after: object) -> Command:
    return command("truncate-logs", "--after", after, real=True)
