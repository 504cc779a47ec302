"""Files beside event files that hold the curves of a run: what its trainer logged elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.formats.fields.constants import TRAINER_STATE
from ckptsurgeon.run.run import Run

NUMBER = re.compile(r"\d+")
HISTORIES = (TRAINER_STATE, "metrics.csv", "metrics.jsonl")


def histories(run: Run) -> list[list[Path]]:
    """Those in the newest checkpoint, in the root, and where event files would be, the first to be
    asked first: Lightning's CSVLogger writes beside the folder of its checkpoints. Then the other
    tables and lines that a surgery would cut, the newest first. Each is of one file, or of those
    that a logger began at each start, oldest first: their paths differ in numbers alone."""
    saved = [run.directory(step) for step in run.steps()[-1:]]
    folders = dict.fromkeys([*saved, run.root, *run.logs.roots()])
    usual = [path for here in folders for name in HISTORIES if disk.is_file(path := here / name)]
    cut = sorted(run.logs.by_kind().rows, key=lambda path: -path.stat().st_mtime_ns)
    alike: dict[str, list[Path]] = {}
    for path in cut:
        alike.setdefault(NUMBER.sub("0", str(path)), []).append(path)
    begun = {path: sorted(paths, key=_numbers) for paths in alike.values() for path in paths}
    every = [tuple(begun.get(path, [path])) for path in (*usual, *cut)]
    return [list(starts) for starts in dict.fromkeys(every)]


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in NUMBER.findall(str(path))]
