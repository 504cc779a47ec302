"""A trace of some iterations, by torch's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Trace:
    """Records iterations `first` to `last` of the span that the config asks for, if it does, into
    one file for chrome://tracing or Perfetto."""

    def __init__(self, span: Sequence[int] | None, folder: Path) -> None:
        self._span, self._folder = span, folder
        self._profiler: Any = None

    def before(self, iteration: int) -> None:
        """Start with the first of the span that is trained."""
        if self._span is None or self._profiler is not None:
            return
        if self._span[0] <= iteration <= self._span[1]:
            import torch.profiler  # half a second that no other run waits for

            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after(self, iteration: int) -> None:
        """Write the file after the last of the span."""
        if self._profiler is not None and self._span is not None and iteration >= self._span[1]:
            self.close()

    def close(self) -> None:
        """Write what has been recorded, also of a span that the run did not reach the end of."""
        if self._profiler is None or self._span is None:
            return
        self._profiler.stop()
        name = f"profile-{self._span[0]}-{self._span[1]}.json"
        self._profiler.export_chrome_trace(str(self._folder / name))
        self._profiler = self._span = None
