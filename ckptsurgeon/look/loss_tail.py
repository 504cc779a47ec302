"""The tail of the loss: its last points, from the ends of the newest event files or of what the
trainer logged elsewhere (`histories`), without NumPy.

`status` shows it. What is read is bounded, however long the run is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats.fields.constants import TRAINER_STATE
from ckptsurgeon.logs import signals
from ckptsurgeon.logs.axis import ITERATION, axis
from ckptsurgeon.logs.signals import GRAD_NORM, LOSS
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.logs.tensorboard.event_file import BORN, Index
from ckptsurgeon.logs.tensorboard.frame import Opened, first_good
from ckptsurgeon.logs.tensorboard.scalars import few
from ckptsurgeon.look.histories import histories
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.run.log_numbers import counts_steps
from ckptsurgeon.run.run import Run

if TYPE_CHECKING:
    from ckptsurgeon.logs.curves import Row

BYTES = 2 << 20 if event_file.native is not None else 256 << 10
"""Bytes that are read in all: some 700 steps of a trainer that logs 35 tags."""
FILES = 4
STEP, NUMBER = "step", "log number"
STATE, LINES = 8 << 20, 256 << 10
"""Bytes of a `trainer_state.json`, some 50,000 points, and of lines, some 4,000."""


@frozen
class LossTail:
    """Steps, ascending, and the loss at them; at least one. `whole`: these are all points that the
    run's logs hold, in one training that never went back. `word` is what a step is called: where it
    is not known that the log counts steps, it is a number of the log."""

    steps: Sequence[int]
    values: Sequence[float]
    whole: bool = False
    word: str = STEP


def loss_tail(run: Run) -> LossTail | None:
    """The last points of the loss in the run's event files, or else in what its trainer logged
    beside them, as `logged.own`; None where no tag is known to be it. Damage ends what is read of
    a file."""
    seen = _events(run) or _history(run)
    if seen is None or counts_steps(run, seen.steps[-1]):
        return seen
    return replace(seen, word=NUMBER)


def _events(run: Run) -> LossTail | None:
    files = _event_files(run)
    newest = _newest(files)
    points: list[tuple[int, float]] = []
    tags, whole = set(), len(newest) == len(files)
    left = BYTES
    for i, path in enumerate(reversed(newest), 1):
        read = _end(path, left)
        older = [point for point in read.points if not points or point[0] < points[0][0]]
        whole = whole and read.whole and len(older) == len(read.points)
        points = older + points
        tags |= {read.tag} if read.points else set()
        left -= min(left, path.stat().st_size)
        if left < 4096:
            whole = whole and i == len(newest)
            break
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    return LossTail(steps, values, whole and len(tags) == 1)


def _history(run: Run) -> LossTail | None:
    """The last rows of the first history that has a loss."""
    for starts in histories(run):
        from ckptsurgeon.logs import curves, rows

        whole: list[bool] = []

        def read(path: Path, whole: list[bool] = whole) -> list[Row]:
            most = STATE if path.name == TRAINER_STATE else LINES
            end, all_ = rows.at_the_end(path, most)
            whole.append(all_)
            return end

        with contextlib.suppress(UsageError):
            kept, left = curves.trained(rows.joined(starts[-FILES:], read))
            losses, norms = (
                {step: values[name] for step, values, _ in kept if name in values}
                for name in (LOSS, GRAD_NORM)
            )
            if losses:
                every = all(whole) and len(starts) <= FILES and not left
                return LossTail(list(losses), _unfiltered(losses, norms), every)
    return None


def _event_files(run: Run) -> list[Path]:
    return [path for path in run.logs.files() if not path.name.endswith(".ckptsurgeon")]


def _newest(files: Sequence[Path]) -> list[Path]:
    """The newest files of the folder that was written to last, oldest first, after those of folders
    that were written before it: each start of a trainer may begin one. Of folders that were written
    at the same time the last one counts."""
    folders: dict[Path, list[tuple[int, Path]]] = {}
    for path in files:
        folders.setdefault(path.parent, []).append((path.stat().st_mtime_ns, path))
    chosen: list[Path] = []
    begun = math.inf
    for dated in sorted(map(sorted, folders.values()), key=lambda dated: dated[-1], reverse=True):
        if dated[-1][0] <= begun:
            chosen = [*(path for _, path in dated), *chosen]
            begun = min((_begun(path) for _, path in dated), default=begun)
    return chosen[-FILES:]


def _begun(path: Path) -> float:
    """The end of the second in which its writer began, by its name, in nanoseconds; -inf where that
    does not say it."""
    found = BORN.search(path.name)
    return (int(found[0]) + 1) * 1e9 if found else -math.inf


@frozen
class _End:
    """Points of the loss and its tag; `whole`: all that the file holds, and no step went back."""

    points: Sequence[tuple[int, float]]
    tag: str | None
    whole: bool


def _end(path: Path, most: int) -> _End:
    """The points of the loss in the last `most` bytes, from where the step went back the last time
    on; of several at one step the last."""
    with Opened(path) as (data, _):
        start = max(0, len(data) - most)
        end = bytes(data[first_good(data, start) if start else 0 :])
    index = event_file.index(end, path, salvage=True)
    names = {tag for group in index.names for tag in group if axis(tag, {}) == ITERATION}
    known = signals.found(names, {})
    if LOSS not in known:
        return _End((), None, not start)
    losses, forward = _trained(_logged(index, end, known[LOSS]))
    hidden = GRAD_NORM in known and 0.0 in losses.values()
    norms = _trained(_logged(index, end, known[GRAD_NORM]))[0] if hidden else {}
    points = list(zip(losses, _unfiltered(losses, norms), strict=True))
    return _End(points, known[LOSS], forward and not start)


def _unfiltered(losses: Mapping[int, float], norms: Mapping[int, float]) -> list[float]:
    """The values of the loss; one of 0 beside a norm that is no number is NaN, as `curves` has it:
    the Trainer logs it so."""
    lost = {step for step, norm in norms.items() if not math.isfinite(norm)}
    return [math.nan if v == 0 and step in lost else v for step, v in losses.items()]


def _trained(logged: Iterable[tuple[int, float]]) -> tuple[dict[int, float], bool]:
    """Numbers by step, from where the step went back the last time on, and whether it never did;
    of several at one step the last."""
    points: dict[int, float] = {}
    last, forward = -1, True
    for step, value in logged:
        if step <= last:
            forward = False
            points = {at: value for at, value in points.items() if at < step}
        points[step] = value
        last = step
    return points, forward


def _logged(index: Index, data: bytes, tag: str) -> Iterator[tuple[int, float]]:
    """Step and number of each event under a tag, in file order."""
    wanted = {i for i, group in enumerate(index.names) if tag in group}
    records = [record for record, series in enumerate(index.tags) if series in wanted]
    return ((int(index.steps[record]), value) for record, value in few(index, data, tag, records))
