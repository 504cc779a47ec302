"""Logs that lie beside a run, in a folder that trainers log into by its name: they may be its own.

Nothing is done with them unless the settings name them, as they may be another run's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.plans.edits import relative
from ckptsurgeon.plans.frozen import frozen
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


@frozen
class Beside:
    """Such a log, or a folder of logs; where it can't be looked at, why."""

    path: Path
    unread: str = ""

    def told(self, run: Path, step: int) -> str:
        """What to know of it in a plan for `step`."""
        name, own = relative(self.path, run), "tensorboard: [., ..]"
        if self.unread:
            return (
                f"{name} can't be looked at ({self.unread}): if logs of this run are there, they "
                "stay as they are"
            )
        if disk.is_folder(self.path):
            name, own = f"{name}/", f"tensorboard: [., {name}]"
        return (
            f"{name} stays as it is, and was written to since step {step} was saved: if it is of "
            f"this run, name its folder in ckptsurgeon.yaml: {own}"
        )


def beside(run: Path, known: Collection[Path], since: float) -> list[Beside]:
    """Such folders, and logs that lie beside the run themselves, that were written to after `since`
    and are in none of the `known` folders; and folders one above that have in them one with the
    name of the run, as `logs/NAME` beside `checkpoints/NAME`. Nothing here is needed: what can't be
    looked at, as a mount whose server is gone, is named; what this user may not read is not."""
    real = Path(os.path.realpath(run))
    if reads.key(run) is not None or any(real.is_relative_to(f) and f != real for f in known):
        return []  # nothing is beside a mirror; and all that is there is looked at
    here, above = real.parent, real.parent.parent
    folders = [here / name for name in (*FOLDERS, *TRACKERS)]
    folders += [above / name / real.name for name in FOLDERS if above != here]
    files: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(here) as items:
        names = [item.name for item in items if EVENTS in item.name or item.name in ROWS]
        files = [here / name for name in names]
    found = []
    for path in sorted([*folders, *files]):
        if path == real or path in known:
            continue
        try:
            logs = _logs(path) if path in folders else filter(disk.is_file, [path])
            if any(_written(log, since) for log in logs):
                found.append(Beside(path))
        except PermissionError:
            continue
        except OSError as error:
            found.append(Beside(path, error.strerror or str(error)))
    return found


def _logs(item: Path) -> Iterator[Path]:
    """The files in a folder that may be logs; none of a link. Raises OSError."""
    if not disk.is_folder(item) or disk.is_link(item):
        return
    seen = 0
    for folder, inner, files in disk.walk(item, past_closed=True):
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
    with contextlib.suppress(PermissionError):
        return disk.is_file(path) and path.stat().st_mtime > since
    return False
