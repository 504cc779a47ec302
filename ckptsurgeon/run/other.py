"""A second run, which a surgery only reads: where its moments, tensors or logs come from."""

from __future__ import annotations

import os
from pathlib import Path

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats.detect import named
from ckptsurgeon.hints import Command
from ckptsurgeon.run.run import Run

OTHER = "name the folder of the other run, which holds its checkpoints"


def open_other(run: Run, folder: str | os.PathLike[str]) -> Run:
    """The run at `folder`, as `Run.open` finds it. The format that was given for `run` is its
    format too where it recognizes that folder: there is one `--format` for both."""
    there = Path(folder)
    fits = run.given and named(run.given).recognizes(there.resolve())
    try:
        return Run.open(there, run.given if fits else "")
    except UsageError as error:  # which may speak of the run that -C names
        hints = (OTHER if isinstance(h, Command) and h.run == "RUN" else h for h in error.hints)
        error.hints = tuple(hints)
        raise
