"""The event files of TensorBoard in one folder, as a log of a run."""

from __future__ import annotations

from ckptsurgeon.logs import cut, note, rename
from ckptsurgeon.logs.axis import ITERATION, axis
from ckptsurgeon.logs.new_names import Counts
from ckptsurgeon.logs.source import Cut, LogSource, NewNames, Stream
from ckptsurgeon.logs.tensorboard import event_file
from ckptsurgeon.logs.tensorboard.frame import Opened, first_good
from ckptsurgeon.plans.edits import AnyChange, relative
from ckptsurgeon.plans.log_fields import TENSORBOARD
from ckptsurgeon.transaction.home import NOTE

END = 256 << 10
"""Bytes at the end of a file in which its last step is looked for."""


class EventFolder(LogSource):
    """What one training, or several by the tags that they log, wrote directly in `path`."""

    def streams(self) -> list[Stream]:
        files = [path for path in event_file.files(self.path) if not path.name.endswith(NOTE)]
        dated = sorted((path.stat().st_mtime_ns, path) for path in files)
        steps: list[int] = []
        for _, path in reversed(dated):
            with Opened(path) as (data, _):
                start = max(0, len(data) - END)
                end = bytes(data[first_good(data, start) if start else 0 :])
            index = event_file.index(end, path, salvage=True)
            on = {i for i, tags in enumerate(index.names)
                  if any(axis(tag, {}) == ITERATION for tag in tags)}  # fmt: skip
            steps = [int(index.steps[i]) for i, tag in enumerate(index.tags) if tag in on]
            if steps:
                break
        return [Stream.of(f"{relative(self.path, self.root)}/", TENSORBOARD, steps)]

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
