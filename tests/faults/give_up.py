"""A sweep: a surgery is killed, somebody writes to one of its files, and where `recover` can't go
on the surgery is given up, killed at each call of that too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.edits import Content, Move, Span, Truncate
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.transaction import entry, given_up, giving_up, journal
from ckptsurgeon.transaction.inverse import kept_tails
from tests.faults import toy
from tests.faults.inject import KILLED, Fault, count_calls, outcome
from tests.faults.sweep import Stage
from tests.faults.world import Point, restore, save
from tests.support.snapshot import HOME, Snapshot, differs, snapshot

FILES = (
    "run/step100/shard0",
    "run/step100/shard2",
    "run/step100/shard3",
    "run/step200/shard0",
    "run/step200/shard1",
    "run/step200/shard3",
    "run/latest",
    "run/last",
    "logs/tfevents",
    "logs/tfevents.cut",
)


# --- what somebody else does ---------------------------------------------------------------------


def write_anew(path: Path) -> None:
    """The same file from its first byte on, as torch.save does."""
    if path.is_symlink():
        path.unlink()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"of somebody else")


def put_another(path: Path) -> None:
    """Another file of the same size in its place."""
    there = path.exists() and not path.is_symlink()
    size = path.stat().st_size if there else 100
    path.parent.mkdir(exist_ok=True)
    beside = path.with_name("beside")
    beside.write_bytes(b"?" * size)
    beside.replace(path)


def append(path: Path) -> None:
    """More bytes at its end."""
    if path.is_file() and not path.is_symlink():
        with path.open("ab") as file:
            file.write(b"of somebody else" * 10)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


DEEDS: dict[str, Callable[[Path], None]] = {
    deed.__name__: deed for deed in (write_anew, put_another, append, remove)
}


# --- surgeries -----------------------------------------------------------------------------------


def _keeping_tails(plan: Plan) -> Plan:
    """An undo that keeps what it cuts off, as `undo` does."""
    cut = [edit for edit in plan.edits if isinstance(edit, Truncate)]
    spans = tuple(Span(edit.file, start, end) for edit in cut for start, end in edit.spans)
    name = kept_tails(plan.id)
    first = Move(name.replace("/attic/", "/staging/"), name, Content(spans))
    return replace(plan, edits=(first, *plan.edits))


def act_undo(world: Path) -> None:
    _commit(world, toy.undo(world))


def act_undo_saved_again(world: Path) -> None:
    _commit(world, toy.undo_saved_again(world))


def _commit(world: Path, plan: Plan) -> None:
    journal.commit(world / "run", _keeping_tails(plan), logs=toy.logs(world), jobs=1)


UNDO, UNDO_SET = replace(toy.UNDO, act=act_undo), replace(toy.UNDO_SET, act=act_undo)
SAVED_AGAIN = replace(toy.SAVED_AGAIN, act=act_undo_saved_again)
SURGERIES = (toy.ROLLBACK, toy.SET_LR, UNDO, UNDO_SET, toy.REPLACE_ALL, SAVED_AGAIN)


# --- the sweep -----------------------------------------------------------------------------------


def give_up(world: Path) -> None:
    run, logs = world / "run", toy.logs(world)
    giving_up.give_up(run, giving_up.plan(run, logs=logs), logs=logs, jobs=1)


def given(stage: Stage, deed: str, every: int = 1, kills: int = 0) -> Iterator[Point]:
    """Each `every`-th call after the commit is killed, and each file is written to then; with
    `kills` about so many calls of giving it up are killed, and it is given up, or recovered,
    again."""
    before, after = visible(stage.before), visible(stage.after)
    commit = max(at for at, call in enumerate(stage.calls, 1) if call == "rename journal.new")
    edited = [file for file in FILES if before.get(file) != after.get(file)]
    for number, file in enumerate(edited):
        for at in range(commit + 1 + number % every, len(stage.calls) + 1, every):
            stage.reset()
            stage.act(Fault("KILL", at))
            DEEDS[deed](stage.world / file)
            where = f"killed at {at} ({stage.calls[at - 1]}), then {deed} {file}"
            if not _is_stuck(stage.world):
                said = _refused(stage.world) or _finishes(stage)
                yield Point(where, 0, said)
                continue
            theirs = visible(snapshot(stage.world, own=True))
            stuck = save(stage.world)
            try:
                calls = count_calls(lambda: give_up(stage.world))
            except SurgeryError as error:
                yield Point(where, 5, f"refused: {error.what}")
                continue
            yield Point(where, 5, _wrong(stage.world, before, theirs, file))
            step = len(calls) // kills + 1 if kills else len(calls)
            for kill in range(1 + at % step, len(calls) + 1 if kills else 1, step):
                restore(stuck, stage.world)
                ended = outcome(lambda: give_up(stage.world), Fault("KILL", kill))
                assert ended.code == KILLED
                again = toy.recover if kill % 2 else give_up
                _again(stage.world, again)
                said = _wrong(stage.world, before, theirs, file)
                yield Point(f"{where}, killed at {kill} ({calls[kill - 1]})", 5, said)


def _is_stuck(world: Path) -> bool:
    """Whether `recover` refuses what it finds."""
    waits = entry.read(world / "run")
    if waits is None or not waits.committed:
        return False
    was = save(world)
    ended = outcome(lambda: toy.recover(world))
    restore(was, world)
    return ended.code == 5


def _refused(world: Path) -> str | None:
    was = snapshot(world, own=True)
    try:
        give_up(world)
    except SurgeryError:
        return differs(snapshot(world, own=True), was, times=True)
    return "it was given up, and `recover` would have gone on"


def _finishes(stage: Stage) -> str | None:
    ended = stage.recover()
    return None if ended.code == 0 else f"recover ends with {ended.code} {ended.told}"


def _again(world: Path, then: Callable[[Path], object]) -> None:
    """Go on after a kill: by that command, or where it refuses by the other."""
    try:
        then(world)
    except SurgeryError:
        (give_up if then is toy.recover else toy.recover)(world)


def visible(found: Snapshot) -> Snapshot:
    """What a trainer sees: all but our own folders."""
    return {name: what for name, what in found.items() if HOME not in name}


def _wrong(world: Path, before: Snapshot, theirs: Snapshot, file: str) -> str | None:
    """What is not as it was before the surgery, but for what somebody else wrote: that is as they
    left it, and the record names it if it is not as before."""
    now = visible(snapshot(world, own=True))
    records = given_up.read(world / "run")
    if len(records) != 1:
        return f"{len(records)} records"
    left = records[0].left
    names = {str((world / "run" / name).resolve().relative_to(world)) for name in left}
    names |= {file} if file.endswith("last") and "last" in left else set()

    def is_left(name: str) -> bool:
        return any(name == one or name.startswith(f"{one}/") for one in names)

    if any(not is_left(file) and not file.startswith(f"{one}/") for one in names):
        return f"{sorted(names)} left, and only {file} was written to"
    ours = {name: what for name, what in now.items() if not is_left(name)}
    wanted = {name: what for name, what in before.items() if not is_left(name)}
    if said := differs(ours, wanted, times=True):
        return said
    kept = {name: what for name, what in now.items() if is_left(name)}
    if said := differs(kept, {n: w for n, w in theirs.items() if is_left(n)}, times=True):
        return f"somebody's: {said}"
    home = {name for name in snapshot(world, own=True) if HOME in name}
    over = [name for name in home if name.endswith(("journal", "lock")) or "/staging" in name]
    if over or entry.interrupted(world / "run"):
        return f"{over} left behind"
    return None
