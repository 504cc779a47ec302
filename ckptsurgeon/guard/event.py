"""What a watch noticed and did, kept in the run: `.ckptsurgeon/watch/<number>/event.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import shell
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.record_types import made
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.names import ID
from ckptsurgeon.transaction.receipts import next_id
from ckptsurgeon.transaction.worker import as_owner

FOLDER = "watch"
SEEN, STOPPED, HEALED, READY, STARTED, ASKED = (
    "seen", "stopped", "healed", "ready", "started", "asked",
)  # fmt: skip
"""How far it came: noticed; the trainer is stopped; the run is edited, where that is what helps;
its start is checked; the trainer runs again. Or a person is asked, and nothing more is done."""
OPEN = (SEEN, STOPPED, HEALED)
"""From where a watch goes on that was killed."""


@frozen
class Event:
    """`cause` is one of the policy's, `what` says it in a sentence, `step` is where it began and
    `signal` what moved first. `saved` is the newest step of then, `next` the surgery that was next,
    `status` that of a trainer which has ended. `receipt` is the surgery that was made, `why` the
    reason for which a person is asked. `pid` is the process that was started, `born` when, in clock
    ticks. `acted` is the time of the last act (Unix): what was logged before is not judged again.
    """

    id: str
    cause: str
    what: str
    when: str
    state: str = SEEN
    step: int | None = None
    signal: str = ""
    saved: int | None = None
    next: str = ""
    status: int | None = None
    receipt: str | None = None
    recipe: str = ""
    why: str = ""
    pid: int = 0
    born: int = 0
    notified: bool = False
    acted: float = 0.0

    def with_(self, **changes: Any) -> Event:
        """The event, one act later."""
        return replace(self, **{"acted": time.time(), **changes})


def folder(root: Path, id: str) -> Path:
    """Where an event and what belongs to it is kept."""
    return root / HOME / FOLDER / id


def read(root: Path) -> list[Event]:
    """Every event, the oldest first. Raises SurgeryError for one that can't be read: the bounds of
    a policy go by all of them."""
    found = []
    for id in _ids(root):
        path = folder(root, id) / "event.json"
        try:
            found.append(made(Event, json.loads(whole_file.read(path, whole_file.MAX_RECORD))))
        except FileNotFoundError:
            continue  # it was not written yet
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise SurgeryError(
                f"{path} is damaged: {error}",
                next=shell(["rm", path], why="a watch counts it no more"),
            ) from None
    return found


def new(root: Path, cause: str, what: str, **more: Any) -> Event:
    """The next event, not written yet."""
    id = f"{max(map(int, _ids(root)), default=0) + 1:04d}"
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Event(id, cause, what, when, next=next_id(root), **more)


def write(root: Path, event: Event) -> Event:
    """Keep it: a crash leaves it as it was, or as it is now."""
    put(root, event.id, "event.json", json.dumps(asdict(event), ensure_ascii=False).encode())
    return event


def put(root: Path, id: str, name: str, data: bytes) -> Path:
    """Keep a file with the event, in place of one of that name."""
    here = folder(root, id)
    with as_owner(root, []):
        for each in (here.parent.parent, here.parent, here):
            if not disk.is_folder(each):
                disk.make_directory(each)
        staged = here / f"{name}.new"
        if disk.is_there(staged):
            disk.remove_file(staged)
        disk.write_new(staged, data)
        disk.rename(staged, here / name)
        disk.fsync_directory(here)
    return here / name


def as_json(event: Event, root: Path) -> Mapping[str, Any]:
    """An event for a program or a person far away, with the files that belong to it."""
    here = folder(root, event.id)
    names = sorted(path.name for path in here.iterdir()) if disk.is_folder(here) else []
    files = {name: str(here / name) for name in names if not name.startswith("event.json")}
    document = asdict(event)
    for name in ("pid", "born", "acted", "next"):
        del document[name]
    return {**document, "files": files}


def _ids(root: Path) -> list[str]:
    here = root / HOME / FOLDER
    return (
        sorted(item.name for item in here.iterdir() if ID.fullmatch(item.name))
        if (disk.is_folder(here))
        else []
    )
