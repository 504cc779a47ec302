"""Logs that lie beside a run, in a folder that trainers log into by its name: they may be its own.

Nothing is done with them unless the settings name them, as they may be another run's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ckptsurgeon.remote import reads
from ckptsurgeon.run import strangers
from ckptsurgeon.transaction.home import EVENTS, HOME, ROWS, is_log

FOLDERS = (
    "csv_logs", "events", "lightning_logs", "log", "logs", "metrics", "mlruns", "runs", "summaries",
    "tb", "tb_logs", "tensorboard", "tensorboard_log", "tensorboard_logs", "tracking", "wandb",
)  # fmt: skip
"""What trainers and trackers call the folder that they log into."""
TRACKERS = (*strangers.FOLDERS, "dvclive", "swanlog")
"""The same of trackers whose logs no surgery reads."""
DEEP, MOST = 3, 2000
"""How many folders deep logs are looked for in one, and how many names in all."""
LINES = (".csv", ".tsv", ".jsonl")


def beside(run: Path, known: Collection[Path], since: float) -> list[Path]:
    """Such folders, and logs that lie beside the run themselves, that were written to after `since`
    and are in none of the `known` folders; and folders one above that have in them one with the
    name of the run, as `logs/NAME` beside `checkpoints/NAME`."""
    real = Path(os.path.realpath(run))
    if reads.key(run) is not None or any(real.is_relative_to(f) and f != real for f in known):
        return []  # nothing is beside a mirror; and all that is there is looked at
    here, above = real.parent, real.parent.parent
    found = [here / name for name in (*FOLDERS, *TRACKERS)]
    found += [above / name / real.name for name in FOLDERS if above != here]
    found = [path for path in found if path.is_dir() and not path.is_symlink()]
    with contextlib.suppress(OSError), os.scandir(here) as items:
        names = [item.name for item in items if EVENTS in item.name or item.name in ROWS]
        found += [here / name for name in names if (here / name).is_file()]
    found = [path for path in sorted(found) if path != real and path not in known]
    return [path for path in found if any(_written(log, since) for log in _logs(path))]


def _logs(item: Path) -> Iterator[Path]:
    """The files in a folder that may be logs."""
    if item.is_file():
        yield item
        return
    seen = 0
    for folder, inner, files in os.walk(item):
        here = Path(folder)
        deep = len(here.relative_to(item).parts) >= DEEP
        inner[:] = [] if deep else [name for name in sorted(inner) if name != HOME]
        for name in files:
            seen += 1
            path = here / name
            if item.name in TRACKERS or is_log(str(path)) or path.suffix in LINES:
                yield path
        if seen > MOST:
            return


def _written(path: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime > since
    return False
