"""A toy run with all kinds of edits, small enough for thousands of crashes.

A toy shard ends with a trailer that says where its lr is. Like torch, the reader looks for the
trailer near the end of the file only, and believes whatever bytes it points at: there is no
checksum, so that a trailer which is on disk before the bytes shows.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from ckptsurgeon.plans.edits import Append, Content, Edit, Link, Move, Replace, Span
from ckptsurgeon.plans.plan import Fingerprint, Plan
from ckptsurgeon.transaction import journal, receipts
from tests.faults.world import Scenario
from tests.support.snapshot import HOME

MAGIC = b"END!"
TRAILER = struct.Struct("<I4s")
REACH = 48
"""So far back from the end of a shard the reader looks for a trailer."""
OLD, NEW = b"lr=0.100", b"lr=0.025"
STEPS = (100, 200)
SHARDS = 4
TIME = 1_700_000_000_123_456_789


class Loud(Exception):
    """The error that a reader of a broken shard gets."""


# --- the run -------------------------------------------------------------------------------------


def build(world: Path) -> None:
    run, logs = world / "run", world / "logs"
    for step in STEPS:
        folder = run / f"step{step}"
        folder.mkdir(parents=True)
        for number in range(SHARDS):
            _put(folder / f"shard{number}", _shard(f"{step}/{number}", OLD))
    (folder / "shard3.backup").hardlink_to(folder / "shard3")
    (run / "step100/shard3.backup").hardlink_to(run / "step100/shard3")
    _put(run / "latest", b"step200")
    _put(run / "iteration.txt", b"200")
    (run / "last").symlink_to("step200")
    logs.mkdir()
    _put(logs / "tfevents", b"".join(b"%04d;" % number for number in range(60)))


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, ns=(TIME, TIME))


def _shard(payload: str, lr: bytes) -> bytes:
    body = payload.encode() * 20
    return body + lr + TRAILER.pack(len(body), MAGIC)


def _lr(path: Path) -> bytes:
    data = path.read_bytes()
    at = data.rfind(MAGIC, max(0, len(data) - REACH))
    if at < 0:
        raise Loud(f"{path}: no trailer")
    offset, _ = TRAILER.unpack_from(data, at + len(MAGIC) - TRAILER.size)
    return data[offset : offset + len(OLD)]


# --- the plans -----------------------------------------------------------------------------------


def logs(world: Path) -> list[Path]:
    """Its log folders, which lie outside the run."""
    return [world.resolve() / "logs"]


def rollback(world: Path) -> Plan:
    """Back to step 100 with a new lr: every kind of edit, the logs outside the run."""
    id = "0001"
    staged, attic = f"{HOME}/staging/{id}", f"{HOME}/attic/{id}"
    events = f"../logs/{HOME}"
    return _plan(
        world,
        [
            *_set_lr(world, 100, id),
            Move(
                f"{events}/staging/{id}/cut",
                "../logs/tfevents.cut",
                Content((Span("../logs/tfevents", 100, 300),), TIME + 1),
            ),
            Replace(
                "../logs/tfevents",
                f"{events}/staging/{id}/events",
                f"{events}/attic/{id}/events",
                Content((Span("../logs/tfevents", 0, 100), b"end"), TIME + 1),
            ),
            Replace("latest", f"{staged}/latest", f"{attic}/latest", Content((b"step100",))),
            Replace(
                "iteration.txt",
                f"{staged}/iteration.txt",
                f"{attic}/iteration.txt",
                Content((b"100",)),
            ),
            Replace("last", f"{staged}/last", f"{attic}/last", Link("step100")),
            Move("step200", f"{attic}/step200"),
        ],
    )


def set_lr(world: Path) -> Plan:
    """A new lr in the shards that the pointers name."""
    return _plan(world, _set_lr(world, 200, "0001"))


def _set_lr(world: Path, step: int, id: str) -> list[Edit]:
    run = world / "run"
    linked = f"step{step}/shard3"
    first: Edit = Replace(
        linked,
        f"{HOME}/staging/{id}/{linked}",
        f"{HOME}/attic/{id}/{linked}",
        Content((_shard(f"{step}/3", NEW),)),
    )
    appends: list[Edit] = []
    for number in range(SHARDS - 1):
        file = f"step{step}/shard{number}"
        info = (run / file).stat()
        at = info.st_size + REACH + 16
        trailer = TRAILER.pack(at, MAGIC)
        writes = ((at, NEW), (at + len(NEW), b"padding."), (at + len(NEW) + 8, trailer))
        appends.append(Append.of(file, info.st_size, writes, info.st_mtime_ns))
    return [first, *appends]


def undo(world: Path) -> Plan:
    """The inverse of the last receipt: what the run lost comes back from the attic."""
    receipts.refuse_damaged(world / "run")
    receipt = receipts.read(world / "run")[-1]
    edits: list[Edit] = []
    for edit in receipt.inverse:
        if isinstance(edit, Replace):
            kept = edit.kept.replace("staging/0001", "attic/0002")
            edit = Replace(edit.file, edit.staged, kept)
        elif isinstance(edit, Move) and "staging" in edit.dst:
            edit = Move(edit.src, edit.dst.replace("staging/0001", "attic/0002"))
        edits.append(edit)
    return _plan(world, edits, id="0002", undoes=receipt.id)


def replace_all(world: Path) -> Plan:
    """A new lr where every shard has a second name, so that all are replaced: the first one makes
    way for an empty file meanwhile, which no reader accepts."""
    edits: list[Edit] = []
    for name in ("shard0.empty", "shard1", "shard2", "shard3", "shard0"):
        shard = name.removesuffix(".empty")
        data = b"" if shard != name else _shard(f"200/{shard[-1]}", NEW)
        staged, kept = f"{HOME}/staging/0001/{name}", f"{HOME}/attic/0001/{name}"
        edits.append(Replace(f"step200/{shard}", staged, kept, Content((data,))))
    return _plan(world, edits)


def undo_saved_again(world: Path) -> Plan:
    """The inverse, where the trainer has saved step 200 again since: its name is taken twice."""
    away = Move("step200", f"{HOME}/attic/0002/step200")
    plan = undo(world)
    return _plan(world, [away, *plan.edits], id=plan.id, undoes=plan.undoes)


def _plan(world: Path, edits: list[Edit], *, id: str = "0001", undoes: str | None = None) -> Plan:
    run = world / "run"
    files = [edit.src if isinstance(edit, Move) else edit.file for edit in edits]
    present = [file for file in [".", "step100", *files] if (run / file).exists()]
    return Plan(
        id=id,
        run=str(run),
        title=f"surgery {id}",
        recipe={"why": "a test"},
        changes=(),
        edits=tuple(edits),
        assumes=tuple(_fingerprint(run, file) for file in dict.fromkeys(present)),
        promise=None,
        undoes=undoes,
    )


def _fingerprint(run: Path, file: str) -> Fingerprint:
    info = (run / file).lstat()
    return Fingerprint(file, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


# --- the reader ----------------------------------------------------------------------------------


def read(world: Path) -> str | None:
    """What is wrong for a trainer that starts now: None when it would load the old state or the
    new one, or fail loudly."""
    run = world / "run"
    for pointer, prefix in (("latest", ""), ("iteration.txt", "step")):
        if not (run / pointer).is_file():
            return f"{pointer} is missing"
        name = prefix + (run / pointer).read_text()
        if name not in ("step100", "step200") or not (run / name).is_dir():
            return f"{pointer} names {name!r}, which is not there"
    if not (run / "last").is_symlink() or not (run / "last" / "shard0").exists():
        return "the link is gone, or leads nowhere"
    for folder in sorted(run.glob("step*")):
        missing = {f"shard{number}" for number in range(SHARDS)} - {
            item.name for item in folder.iterdir()
        }
        if missing:
            return f"{folder.name}: {missing} missing"
        found = set()
        try:
            for number in range(SHARDS):
                found.add(_lr(folder / f"shard{number}"))
        except Loud:
            continue
        if found not in ({OLD}, {NEW}):
            return f"{folder.name} is a mix: {sorted(found)}"
    if (run / "latest").read_text() == "step100" and OLD in _lrs(run / "step100"):
        return "the pointer is new, and a shard is old"
    return None


def _lrs(folder: Path) -> set[bytes]:
    found = set()
    for number in range(SHARDS):
        try:
            found.add(_lr(folder / f"shard{number}"))
        except Loud:
            return set()
    return found


# --- scenarios -----------------------------------------------------------------------------------


def act_rollback(world: Path) -> None:
    journal.commit(world / "run", rollback(world), logs=logs(world), jobs=1)


def act_set_lr(world: Path) -> None:
    journal.commit(world / "run", set_lr(world), logs=logs(world), jobs=1)


def act_undo(world: Path) -> None:
    journal.commit(world / "run", undo(world), logs=logs(world), jobs=1)


def recover(world: Path) -> None:
    journal.recover(world / "run", logs=logs(world), jobs=1)


def build_rolled_back(world: Path) -> None:
    build(world)
    act_rollback(world)


def build_set(world: Path) -> None:
    build(world)
    act_set_lr(world)


def build_linked(world: Path) -> None:
    build(world)
    for number in range(SHARDS - 1):
        shard = world / f"run/step200/shard{number}"
        shard.with_name(f"{shard.name}.backup").hardlink_to(shard)


def act_replace_all(world: Path) -> None:
    journal.commit(world / "run", replace_all(world), logs=logs(world), jobs=1)


def act_in_threads(world: Path) -> None:
    journal.commit(world / "run", rollback(world), logs=logs(world), jobs=4)


def build_saved_again(world: Path) -> None:
    build_rolled_back(world)
    again = world / "run/step200"
    again.mkdir()
    for number in range(SHARDS):
        _put(again / f"shard{number}", _shard(f"200/{number} again", NEW))


def act_undo_saved_again(world: Path) -> None:
    journal.commit(world / "run", undo_saved_again(world), logs=logs(world), jobs=1)


ROLLBACK = Scenario("rollback", build, act_rollback, recover, read)
SET_LR = Scenario("set lr", build, act_set_lr, recover, read)
UNDO = Scenario("undo of rollback", build_rolled_back, act_undo, recover, read)
UNDO_SET = Scenario("undo of set lr", build_set, act_undo, recover, read)
REPLACE_ALL = Scenario("replace all", build_linked, act_replace_all, recover, read)
SAVED_AGAIN = Scenario("undo, saved again", build_saved_again, act_undo_saved_again, recover, read)
IN_THREADS = Scenario("rollback in threads", build, act_in_threads, recover, read)

SCENARIOS = (ROLLBACK, SET_LR, UNDO, UNDO_SET, REPLACE_ALL, SAVED_AGAIN)
