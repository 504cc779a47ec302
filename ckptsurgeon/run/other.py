"""A second run, which a surgery only reads: where its moments, tensors or logs come from."""

from __future__ import annotations

import os
from pathlib import Path

from ckptsurgeon.formats.detect import named
from ckptsurgeon.run.run import Run


def open_other(run: Run, folder: str | os.PathLike[str]) -> Run:
    """The run at `folder`, as `Run.open` finds it. The format that was given for `run` is its
    format too where it recognizes that folder: there is one `--format` for both."""
    there = Path(folder)
    fits = run.given and named(run.given).recognizes(there.resolve())
    return Run.open(there, run.given if fits else "")
