"""Runs in which somebody else wrote the surgeon's own records: each source with each kind of lie.

A lie leads a record to a file that is not the run's. Beside the run lies a `victim`, a file and a
folder that no command may touch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ckptsurgeon import Run, plan, plan_undo, surgery
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import HOME
from tests.support.tiny_run import make_run

OWNER = 65534
PRECIOUS = "precious"
"""What is in the victim's files."""
DEAD = 2**22 + 1
"""No process has this number."""
Lie = Callable[[Path, str], None]
LEADS = {
    "climbs": "../victim/file",
    "climbs in the middle": "checkpoint-4/../../victim/file",
    "is absolute": "{world}/victim/file",
    "goes through a link": "linked/file",
    "climbs out of the attic": f"{HOME}/attic/0001/../../../../victim/file",
    "goes through a linked attic": f"{HOME}/attic/0000/file",
    "is an event file of others": "../victim/events.out.tfevents.1",
}
"""How a name leads to the victim; the run has the links."""


class Source(NamedTuple):
    """Where a lie stands, and the commands that could believe it."""

    lie: Lie
    commands: Sequence[Sequence[str]]


def world(place: Path) -> Path:
    """A folder with a run on which one surgery was done, and the victim beside it."""
    victim = place / "victim"
    (victim / "empty").mkdir(parents=True)
    for name in ("file", "events.out.tfevents.1"):
        (victim / name).write_text(PRECIOUS)
    (victim / "file.heir").write_text(json.dumps(_record("0123456789abcdef")))
    root = make_run(place / "run", steps=(4, 8))
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"rollback": {"to": 4}})))
    (root / "linked").symlink_to(victim)
    (root / "latest").write_text("a file of the run")
    (root / HOME / "attic/0000").symlink_to(victim)
    (root / HOME / "attic/0001/file").write_text("planted")
    return place


def copied(template: Path, place: Path) -> Path:
    """Another such folder."""
    return Path(shutil.copytree(template, place, symlinks=True))


def owned(place: Path, owner: int) -> Path:
    """The run becomes that user's, and what is beside it stays."""
    for path in (place / "run", *(place / "run").rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)
    return place


# --- receipts ------------------------------------------------------------------------------------


def receipt(root: Path, surgery: str = "0001", /, **said: Any) -> None:
    """The receipt of this surgery says this, too."""
    path = root / HOME / f"receipts/{surgery}/receipt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    (root / HOME / "staging/0001").mkdir(parents=True, exist_ok=True)


def _inverse(*edits: Any) -> Lie:
    return lambda root, lead: receipt(root, inverse=_filled(edits, lead))


def _undone(edit: dict[str, Any]) -> Lie:
    """The surgery was undone, and the receipt of that says this."""

    def lie(root: Path, lead: str) -> None:
        run = Run.open(root)
        surgery.apply(run, plan_undo(run, "0001"))
        receipt(root, "0002", inverse=_filled([edit], lead))

    return lie


def _filled(value: Any, lead: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, lead) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(item, lead) for item in value]
    return value.replace("LEAD", lead) if isinstance(value, str) else value


def _id(root: Path, lead: str) -> None:
    receipt(root, id=lead.rpartition("/")[0] or lead)  # the folder of the victim


KEPT = f"{HOME}/attic/0001/file"
MOVES: dict[str, dict[str, Any]] = {
    "move from": {"kind": "Move", "src": "LEAD", "dst": "stolen", "content": None, "like": None},
    "move to": {"kind": "Move", "src": KEPT, "dst": "LEAD.tfevents", "content": None, "like": None},
    "replace": {"kind": "Replace", "file": "LEAD", "staged": KEPT,
                "kept": f"{HOME}/staging/0001/k", "content": None},
    "replace by": {"kind": "Replace", "file": "latest", "staged": "LEAD",
                   "kept": f"{HOME}/staging/0001/k", "content": None},
    "replace and keep as": {"kind": "Replace", "file": "latest", "staged": KEPT, "kept": "LEAD.new",
                            "content": None},
    "truncate": {"kind": "Truncate", "file": "LEAD", "old_size": 1, "new_size": 8,
                 "digest": hashlib.sha256(b"recious").hexdigest(), "spans": [[1, 8]],
                 "mtime_ns": 0},
}  # fmt: skip
TAIL = {
    "kind": "Tail", "file": "LEAD", "old_size": 8, "spans": [[8, 12]], "at": 0,
    "digest": hashlib.sha256(b"evil").hexdigest(),
    "anchor": hashlib.sha256(b"precious").hexdigest(),
}  # fmt: skip


# --- journals ------------------------------------------------------------------------------------


def journal(root: Path, **said: Any) -> None:
    """A journal with a correct checksum."""
    entry = {"id": "0002", "title": "set lr", "files": [], "directories": [], "steps": [],
             "committed": True, **said}  # fmt: skip
    body = json.dumps(entry).encode()
    (root / HOME / "journal").write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    staging = root / HOME / "staging"
    for id in ("0001", "0002"):
        (staging / id).mkdir(parents=True, exist_ok=True)
    (staging / "0002.tails").write_bytes(b"evil")


def _empty(lead: str) -> str:
    """The empty folder beside what it leads to."""
    return f"{lead.rpartition('/')[0]}/empty"


def _step(edit: dict[str, Any]) -> Lie:
    return lambda root, lead: journal(root, steps=_filled([edit], lead))


# --- other sources -------------------------------------------------------------------------------


def lock(root: Path, token: str) -> None:
    """A stale lock, and what its token would make a claim lead through."""
    (root / HOME / "lock").write_text(json.dumps(_record(token)))


def _record(token: str) -> dict[str, Any]:
    return {
        "token": token, "host": os.uname().nodename, "boot": "another boot",
        "namespace": Path("/proc/self/ns/pid").stat().st_ino, "pid": DEAD, "start": 1, "uid": 0,
        "title": "set lr", "time": "2026-01-01T00:00:00Z",
    }  # fmt: skip


def _token(root: Path, lead: str) -> None:
    lock(root, f"/../../{lead}")
    (root / HOME / "lock.").mkdir(exist_ok=True)


def settings(root: Path, **said: Any) -> None:
    (root / "ckptsurgeon.yaml").write_text(yaml.safe_dump(said))


def _pointer(root: Path, lead: str) -> None:
    page = {"name": "page", "files": {"checkpoint-{step}/optimizer.pt": {"optimizers": [[]]}},
            "pointer": {"file": lead, "text": "{step}"}}  # fmt: skip
    (root / "page.yaml").write_text(yaml.safe_dump(page))
    settings(root, format="page.yaml")


def _logs(root: Path, lead: str) -> None:
    settings(root, tensorboard=[str(Path(lead).parent), "/"])


def saved_plan(root: Path, *edits: Any) -> None:
    document = {
        "kind": "Plan", "id": "0002", "run": str(root), "title": "set lr", "recipe": {},
        "changes": [], "edits": list(edits), "assumes": [], "promise": None,
    }  # fmt: skip
    (root / "plan.json").write_text(json.dumps(document))
    (root / HOME / "staging/0001").mkdir(parents=True, exist_ok=True)


def _planned(edit: dict[str, Any]) -> Lie:
    return lambda root, lead: saved_plan(root, *_filled([edit], lead))


def _copying(lead_in: str) -> Lie:
    """A plan that copies bytes of the victim into a file of the run."""
    piece = {"kind": "Span", "file": lead_in, "start": 0, "end": 8}
    content = {"kind": "Content", "pieces": [piece], "mtime_ns": None}
    edit = {"kind": "Move", "src": f"{HOME}/staging/0002/new", "dst": "new", "content": content,
            "like": None}  # fmt: skip
    return _planned(edit)


UNDO = (("undo", "-n"), ("undo", "-y"))
REDO = (("redo", "-n"), ("redo", "-y"), ("undo", "-y"), ("log",))
RECOVER = (("recover", "-n"), ("recover",))
PRUNE = (("prune", "--keep", "0", "-y"),)
SET = (("set", "lr=1e-5", "-y"),)
ROLLBACK = (("rollback", "--to", "4", "-y"),)
APPLY = (("apply", "PLAN", "-n"), ("apply", "PLAN", "-y"))
LOOK = (("status",), ("log",), ("verify",))
SOURCES = {
    "receipt: id": Source(_id, (*PRUNE, *UNDO, *LOOK)),
    **{f"receipt: {k}": Source(_inverse(edit), (*UNDO, *PRUNE)) for k, edit in MOVES.items()},
    **{f"journal: {k}": Source(_step(edit), (*RECOVER, *SET)) for k, edit in MOVES.items()},
    **{f"undo's receipt: {k}": Source(_undone(edit), REDO) for k, edit in MOVES.items()},
    "journal: append": Source(_step(TAIL), RECOVER),
    "journal: files": Source(
        lambda root, lead: journal(root, files=[lead], committed=False), (*RECOVER, *SET)
    ),
    "journal: directories": Source(
        lambda root, lead: journal(root, directories=[_empty(lead)], committed=False), RECOVER
    ),
    "journal: id": Source(lambda root, lead: journal(root, id=lead), RECOVER),
    "lock: token": Source(_token, (*SET, *UNDO, *RECOVER, ("unlock", "-y"), ("status",))),
    "page: pointer": Source(_pointer, (*ROLLBACK, *SET, ("repair-latest", "-y"), ("status",))),
    "settings: tensorboard": Source(_logs, (*ROLLBACK, *PRUNE, *UNDO, ("status",))),
    **{f"plan: {k}": Source(_planned(edit), APPLY) for k, edit in MOVES.items()},
    "plan: copy": Source(_copying("LEAD"), APPLY),
}  # fmt: skip


def cases() -> Iterator[tuple[str, str]]:
    """Every source with every way to lead elsewhere."""
    for source in SOURCES:
        for lead in LEADS:
            yield source, lead


def told(root: Path, source: str, lead: str) -> None:
    """Tell this lie in the run."""
    SOURCES[source].lie(root, LEADS[lead].format(world=root.parent))
