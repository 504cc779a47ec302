"""Files beside event files that hold the curves of a run: what its trainer logged elsewhere."""

from __future__ import annotations

from pathlib import Path

from ckptsurgeon.formats.fields.constants import TRAINER_STATE
from ckptsurgeon.run.run import Run

HISTORIES = (TRAINER_STATE, "metrics.csv", "metrics.jsonl")


def histories(run: Run) -> list[Path]:
    """Those in the newest checkpoint, in the root, and where event files would be, the first to be
    asked first: Lightning's CSVLogger writes beside the folder of its checkpoints. Then the other
    tables and lines that a surgery would cut, the newest first: a logger may begin a new folder at
    each start."""
    saved = [run.directory(step) for step in run.steps()[-1:]]
    folders = dict.fromkeys([*saved, run.root, *run.logs.roots()])
    usual = [path for here in folders for name in HISTORIES if (path := here / name).is_file()]
    others = sorted(run.logs.by_kind().rows, key=lambda path: -path.stat().st_mtime_ns)
    return list(dict.fromkeys([*usual, *others]))
