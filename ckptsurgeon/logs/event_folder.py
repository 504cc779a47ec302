"""The event files of TensorBoard in one folder, as a log of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptsurgeon.logs import cut, lineage, note, rename
from ckptsurgeon.logs.axis import ITERATION, axis
from ckptsurgeon.logs.history import Ended
from ckptsurgeon.logs.new_names import Counts
from ckptsurgeon.logs.source import Counted, Cut, LogSource, NewNames, Stream
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.logs.tensorboard.event_file import Index
from ckptsurgeon.logs.tensorboard.frame import Opened, first_good
from ckptsurgeon.plans.edits import AnyChange, relative
from ckptsurgeon.plans.log_fields import TENSORBOARD
from ckptsurgeon.transaction.home import NOTE

END = 256 << 10
"""Bytes at the end of a file in which its last step is looked for."""


def of_all(sentences: Iterable[str], folders: Sequence[Path]) -> list[str]:
    """The sentences about single folders of a run, as they hold for all its `folders`: where one
    ends on the way to a step, another may go on."""
    said = []
    for text in sentences:
        if isinstance(text, Ended):
            step = _next(folders, text.last, text.point)
            if step is not None and step - text.last <= text.interval:
                continue
            text = text if step is None else text.before(step)
        said.append(text)
    return said


def _next(folders: Iterable[Path], last: int, point: int) -> int | None:
    """The first step after `last`, up to `point`, that an event in one of the folders is of."""
    found = []
    for path in (path for folder in folders for path in _written(folder)):
        index = event_file.scan(path, salvage=True)
        on = _on_steps(index)
        own = zip(index.tags, index.steps, strict=True)
        found += [int(step) for tag, step in own if tag in on and last < step <= point]
    return min(found, default=None)


def _written(folder: Path) -> list[Path]:
    """The event files in it that a trainer wrote."""
    return [path for path in event_file.files(folder) if not path.name.endswith(NOTE)]


def _on_steps(index: Index) -> set[int]:
    """The numbers of its series that count steps."""
    on = enumerate(index.names)
    return {i for i, tags in on if any(axis(tag, {}) == ITERATION for tag in tags)}


class EventFolder(LogSource):
    """What one training, or several by the tags that they log, wrote directly in `path`."""

    def streams(self) -> list[Stream]:
        dated = sorted((path.stat().st_mtime_ns, path) for path in _written(self.path))
        steps: list[int] = []
        for _, path in reversed(dated):
            with Opened(path) as (data, _):
                start = max(0, len(data) - END)
                end = bytes(data[first_good(data, start) if start else 0 :])
            index = event_file.index(end, path, salvage=True)
            on = _on_steps(index)
            steps = [int(index.steps[i]) for i, tag in enumerate(index.tags) if tag in on]
            if steps:
                break
        return [Stream.of(f"{relative(self.path, self.root)}/", TENSORBOARD, steps)]

    def counted(self) -> list[Counted]:
        files = [event_file.scan(path, salvage=True) for path in _written(self.path)]
        name = f"{relative(self.path, self.root)}/"
        logs = []
        found = lineage.clocks(files)
        for series, points in found.items():
            its = name if len(found) == 1 else f"{name} (with the tag {series[0]})"
            stream = Stream.of(its, TENSORBOARD, points.steps.tolist())
            logs.append(Counted(stream, points, series))
        return logs

    def cut(self, cut_: Cut) -> tuple[list[AnyChange], list[str]]:
        return cut.truncate(
            self.path,
            self.root,
            cut_.marks,
            keep_as=cut_.keep_as,
            salvage=cut_.salvage,
            branch=cut_.branch,
            order=cut_.order,
            axes=cut_.axes,
        )

    def rename_keys(self, names: NewNames) -> tuple[list[AnyChange], Counts]:
        return rename.rename(
            self.path, self.root, names.pairs, regex=names.regex, allow_merge=names.allow_merge
        )

    def note(self, step: int, text: str, when: float) -> list[AnyChange]:
        return [note.note(self.path, self.root, step, text, when)]
