"""One transaction: commit, receipt, undo, recover, and what each of them refuses or leaves."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import disk
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.plans.edits import Content, Move, Replace
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.transaction import entry, journal, receipts
from ckptsurgeon.workers import each
from tests.faults import toy
from tests.faults.inject import Fault, count_calls, hooked, outcome
from tests.faults.world import workplace
from tests.support.snapshot import HOME, Snapshot, differs, snapshot


@pytest.fixture
def world() -> Iterator[Path]:
    with workplace() as place:
        toy.build(place)
        yield place


def visible(world: Path) -> Snapshot:
    """What a trainer sees: all but our own directories."""
    return {name: what for name, what in snapshot(world, own=True).items() if HOME not in name}


def cut_off(world: Path, at: int) -> None:
    """A commit that is killed at its `at`-th call."""
    assert outcome(lambda: toy.act_rollback(world), Fault("KILL", at)).code == -9


@functools.cache
def call(name: str) -> int:
    """The number of the first call of that name in a clean commit."""
    with workplace() as other:
        toy.build(other)
        return count_calls(lambda: toy.act_rollback(other)).index(name) + 1


# --- commit --------------------------------------------------------------------------------------


def test_commit_does_every_edit(world: Path) -> None:
    run = world / "run"
    old = {str(p.relative_to(world)): p.read_bytes() for p in world.rglob("*") if p.is_file()}
    journal.commit(run, toy.rollback(world), logs=toy.logs(world))
    assert toy.read(world) is None
    assert (run / "latest").read_text() == "step100"
    assert not (run / "step200").exists()
    assert {toy._lr(run / f"step100/shard{n}") for n in range(toy.SHARDS)} == {toy.NEW}
    for number in range(toy.SHARDS - 1):
        before = old[f"run/step100/shard{number}"]
        assert (run / f"step100/shard{number}").read_bytes().startswith(before)
    assert (run / "step100/shard3.backup").read_bytes() == old["run/step100/shard3"]
    assert (world / "logs/tfevents").stat().st_mtime_ns == toy.TIME + 1
    assert (world / "logs/tfevents.cut").read_bytes() == old["logs/tfevents"][100:300]


def test_many_threads_do_what_one_does(
    world: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    toy.build(other)
    journal.commit(world / "run", toy.rollback(world), logs=toy.logs(world), jobs=8)
    journal.commit(other / "run", toy.rollback(other), logs=toy.logs(other), jobs=1)
    assert differs(snapshot(world, own=True), snapshot(other, own=True), times=False) is None


def test_a_new_file_has_the_rights_of_the_old_one(world: Path) -> None:
    (world / "run/latest").chmod(0o664)
    journal.commit(world / "run", toy.rollback(world), logs=toy.logs(world))
    assert (world / "run/latest").stat().st_mode & 0o777 == 0o664


def test_progress_counts_up_to_all(world: Path) -> None:
    said: list[tuple[str, int, int]] = []
    plan = toy.rollback(world)
    journal.commit(
        world / "run", plan, logs=toy.logs(world), progress=lambda *what: said.append(what)
    )
    phases = {phase for phase, _, _ in said}
    for phase in phases:
        done = [(done, total) for which, done, total in said if which == phase]
        assert done == sorted(done)
        assert done[0][0] == 0
        assert done[-1][0] == done[-1][1]
    assert phases == {"staging", "editing"}
    assert ("editing", len(plan.edits), len(plan.edits)) in said


def test_a_receipt_says_who_what_when(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-else")
    monkeypatch.setenv("SECRET_TOKEN", "do-not-keep")
    receipt = journal.commit(world / "run", toy.rollback(world), logs=toy.logs(world))
    assert receipts.read(world / "run") == [receipt]
    assert (receipt.id, receipt.why, receipt.host) == ("0001", "a test", os.uname().nodename)
    assert receipt.when.endswith("+00:00")
    assert receipt.user != "somebody-else"
    folder = world / "run/.ckptsurgeon/receipts/0001"
    assert json.loads((folder / "recipe.json").read_text()) == {"why": "a test"}
    assert "do-not-keep" not in (folder / "receipt.json").read_text()
    assert receipts.next_id(world / "run") == "0002"


def test_nothing_is_left_inside_a_checkpoint(world: Path) -> None:
    before = set(snapshot(world / "run/step100", own=True))
    journal.commit(world / "run", toy.rollback(world), logs=toy.logs(world))
    assert set(snapshot(world / "run/step100", own=True)) == before


# --- undo ----------------------------------------------------------------------------------------


def test_undo_is_bit_identical_with_times(world: Path) -> None:
    before = visible(world)
    inodes = {name: (world / name).lstat().st_ino for name in before}
    journal.commit(world / "run", toy.rollback(world), logs=toy.logs(world))
    journal.commit(world / "run", toy.undo(world), logs=toy.logs(world))
    assert visible(world) == before
    assert {name: (world / name).lstat().st_ino for name in before} == inodes
    assert [receipt.undoes for receipt in receipts.read(world / "run")] == [None, "0001"]


def test_a_surgery_after_an_undo_does_the_same_again(world: Path) -> None:
    journal.commit(world / "run", toy.set_lr(world))
    after = visible(world)
    journal.commit(world / "run", toy.undo(world), logs=toy.logs(world))
    plan = dataclasses.replace(toy.set_lr(world), id="0003")
    edits = tuple(_renumber(edit) for edit in plan.edits)
    journal.commit(world / "run", dataclasses.replace(plan, edits=edits), logs=toy.logs(world))
    assert differs(visible(world), after, times=False) is None


def _renumber(edit: Any) -> Any:
    if isinstance(edit, Replace):
        new = {name: getattr(edit, name).replace("0001", "0003") for name in ("staged", "kept")}
        return dataclasses.replace(edit, **new)
    return edit


def test_undo_refuses_a_tail_that_is_not_ours(world: Path) -> None:
    journal.commit(world / "run", toy.set_lr(world))
    shard = world / "run/step200/shard1"
    data = bytearray(shard.read_bytes())
    data[-20] ^= 1
    shard.write_bytes(data)
    before = snapshot(world, own=True)
    with pytest.raises(SurgeryError, match=r"shard1.*not those that this surgery wrote"):
        journal.commit(world / "run", toy.undo(world), logs=toy.logs(world))
    assert snapshot(world, own=True) == before


def test_an_undo_that_truncates_has_no_inverse(world: Path) -> None:
    """The bytes that it cuts off are not kept: it is undone by its recipe."""
    journal.commit(world / "run", toy.set_lr(world))
    assert journal.commit(world / "run", toy.undo(world), logs=toy.logs(world)).inverse == ()


@pytest.mark.parametrize("code", disk.NO_HARD_LINKS, ids=errno.errorcode.get)
def test_a_file_system_without_hard_links_does_the_same(world: Path, code: int) -> None:
    before = visible(world)
    with workplace() as other:
        toy.build(other)
        toy.act_rollback(other)
        after = visible(other)
    with hooked(functools.partial(_no_links, code)):
        toy.act_rollback(world)
        assert differs(visible(world), after, times=False) is None
        toy.act_undo(world)
    assert differs(visible(world), before, times=False) is None


def test_a_local_disk_that_ends_a_link_with_an_io_error_is_not_trusted(world: Path) -> None:
    ended = outcome(lambda: toy.act_rollback(world), Fault("EIO", call("link shard3")))
    assert ended.code == 5
    assert entry.interrupted(world / "run") == "surgery 0001"
    assert journal.recover(world / "run", logs=toy.logs(world)).outcome == "finished"


def _no_links(code: int, operation: str, path: str, details: Mapping[str, Any]) -> None:
    if operation == "link":
        raise OSError(code, os.strerror(code), path)


# --- interrupted ---------------------------------------------------------------------------------


def test_an_interrupted_surgery_blocks_the_next(world: Path) -> None:
    cut_off(world, call("rename step200"))
    assert entry.interrupted(world / "run") == "surgery 0001"
    before = snapshot(world, own=True)
    with pytest.raises(InterruptedSurgery, match="surgery 0001") as caught:
        journal.commit(world / "run", toy.set_lr(world))
    assert "ckptsurgeon recover" in caught.value.next[0]
    found = {name: what for name, what in snapshot(world, own=True).items() if "/lock" not in name}
    assert found == {name: what for name, what in before.items() if "/lock" not in name}
    steps = journal.waiting(world / "run", toy.logs(world))
    assert "step100/shard3" in {step.file for step in steps if isinstance(step, Replace)}
    assert journal.recover(world / "run", logs=toy.logs(world)) == journal.Recovery(
        "finished", "surgery 0001", "0001", steps
    )
    assert entry.interrupted(world / "run") is None
    assert len(receipts.read(world / "run")) == 1


def test_a_staged_surgery_is_discarded(world: Path) -> None:
    before = snapshot(world, own=True)
    cut_off(world, call("create latest"))
    assert entry.interrupted(world / "run") == "surgery 0001"
    assert journal.recover(world / "run", logs=toy.logs(world)) == journal.Recovery(
        "discarded", "surgery 0001"
    )
    assert snapshot(world, own=True) == {
        **before,
        **{n: w for n, w in snapshot(world, own=True).items() if "other" in n},
    }
    journal.commit(world / "run", toy.rollback(world), logs=toy.logs(world))


def test_recover_without_a_surgery_writes_nothing(world: Path) -> None:
    assert count_calls(lambda: journal.recover(world / "run", logs=toy.logs(world))) == []
    journal.commit(world / "run", toy.rollback(world), logs=toy.logs(world))
    assert count_calls(lambda: journal.recover(world / "run", logs=toy.logs(world))) == []
    assert journal.recover(world / "run", logs=toy.logs(world)) == journal.Recovery("nothing")


def test_recover_refuses_a_shard_that_was_saved_again(world: Path) -> None:
    """A trainer that overwrote a shard after the crash would lose what it wrote."""
    cut_off(world, call("link latest"))
    shard = world / "run/step100/shard0"
    new = bytes(len(shard.read_bytes()))
    shard.write_bytes(new)
    with pytest.raises(InterruptedSurgery, match=r"shard0.*another file"):
        journal.recover(world / "run", logs=toy.logs(world))
    assert shard.read_bytes() == new


def test_a_damaged_journal_is_not_acted_on(world: Path) -> None:
    cut_off(world, call("rename step200"))
    path = world / "run/.ckptsurgeon/journal"
    path.write_bytes(path.read_bytes().replace(b"step200", b"step100"))
    before = visible(world)
    assert "damaged" in str(entry.interrupted(world / "run"))
    with pytest.raises(InterruptedSurgery, match="damaged"):
        journal.recover(world / "run", logs=toy.logs(world))
    assert visible(world) == before


def test_damaged_staged_bytes_are_not_written(world: Path) -> None:
    cut_off(world, call("write shard0"))
    path = world / "run/.ckptsurgeon/staging/0001.tails"
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(InterruptedSurgery, match="staged bytes of step100/shard0 are damaged"):
        journal.recover(world / "run", logs=toy.logs(world))


def test_a_damaged_receipt_is_named(world: Path) -> None:
    journal.commit(world / "run", toy.rollback(world), logs=toy.logs(world))
    path = world / "run/.ckptsurgeon/receipts/0001/receipt.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(SurgeryError, match=r"receipt\.json is damaged: byte \d+ of \d+"):
        receipts.refuse_damaged(world / "run")
    assert receipts.read(world / "run") == []
    assert receipts.next_id(world / "run") == "0002"  # its attic has the name 0001


# --- file systems --------------------------------------------------------------------------------


def test_without_hard_links_the_old_file_is_copied(world: Path) -> None:
    """Every link fails as it does on FAT and some FUSE mounts; the copy keeps time and rights."""
    (world / "run/latest").chmod(0o600)
    before = visible(world)

    def refuse(operation: str, path: str, details: Mapping[str, Any]) -> None:
        if operation == "link":
            raise OSError(errno.EPERM, "Operation not permitted", path)

    with hooked(refuse):
        toy.act_rollback(world)
        kept = world / "run/.ckptsurgeon/attic/0001/latest"
        assert (kept.stat().st_mtime_ns, kept.stat().st_mode & 0o777) == (toy.TIME, 0o600)
        toy.act_undo(world)
    assert visible(world) == before


def test_another_users_files_get_their_bytes_back_and_keep_their_times(world: Path) -> None:
    """Whoever may write to a file may cut it; its time only its owner may set (utimensat(2))."""

    def of_another_user(operation: str, path: str, details: Mapping[str, Any]) -> None:
        if operation == "set_times":
            raise OSError(errno.EPERM, "Operation not permitted", path)

    before = visible(world)
    with hooked(of_another_user):
        journal.commit(world / "run", toy.set_lr(world))
        journal.commit(world / "run", toy.undo(world), logs=toy.logs(world))
        assert journal.recover(world / "run", logs=toy.logs(world)).outcome == "nothing"
    assert differs(visible(world), before, times=False) is None


def test_a_second_ctrl_c_waits_for_what_has_begun() -> None:
    """Or a thread would write on while the surgery is taken back, and after the lock is gone."""
    main = threading.main_thread().ident
    assert main is not None
    begun: list[int] = []
    over: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            for _ in range(3):
                time.sleep(0.1)
                signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.5)
        over.append(item)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    try:
        with pytest.raises(KeyboardInterrupt):
            each(work, range(40), jobs=4)
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun
    assert sorted(over) == sorted(begun)
    assert len(begun) < 40


def test_a_symbolic_link_is_replaced_and_brought_back(world: Path) -> None:
    pointer = world / "run/latest"
    pointer.rename(world / "shared-latest")
    pointer.symlink_to("../shared-latest")
    before = visible(world)
    toy.act_rollback(world)
    assert not pointer.is_symlink()
    assert (world / "shared-latest").read_text() == "step200"
    toy.act_undo(world)
    assert visible(world) == before


def test_a_file_that_is_replaced_twice_keeps_its_order(world: Path) -> None:
    """How a plan of replacements alone makes its readers fail loudly in between."""
    run = world / "run"
    edits = []
    for name, text in (("latest", b"loud"), ("iteration.txt", b"100"), ("latest", b"step100")):
        staged, kept = (f"{HOME}/{kind}/0001/{text.decode()}" for kind in ("staging", "attic"))
        edits.append(Replace(name, staged, kept, Content((text,))))
    seen = []

    def look(operation: str, path: str, details: Mapping[str, Any]) -> None:
        seen.append(((run / "latest").read_text(), (run / "iteration.txt").read_text()))

    plan = dataclasses.replace(toy.rollback(world), edits=tuple(edits), assumes=())
    with hooked(look):
        receipt = journal.commit(run, plan)
    assert list(dict.fromkeys(seen)) == [
        ("step200", "200"), ("loud", "200"), ("loud", "100"), ("step100", "100"),
    ]  # fmt: skip
    assert [edit.staged for edit in receipt.inverse if isinstance(edit, Replace)] == [
        f"{HOME}/attic/0001/{name}" for name in ("step100", "100", "loud")
    ]


def test_a_new_directory_is_made_and_removed_again(world: Path) -> None:
    move = Move("latest", f"{HOME}/attic/0001/deep/down/latest")
    plan = dataclasses.replace(toy.rollback(world), edits=(move,), assumes=())
    before = visible(world)
    receipt = journal.commit(world / "run", plan, logs=toy.logs(world))
    undo = dataclasses.replace(plan, id="0002", edits=receipt.inverse)
    journal.commit(world / "run", undo, logs=toy.logs(world))
    assert visible(world) == before
    assert not (world / "run/.ckptsurgeon/attic").exists()


def test_an_empty_plan_leaves_a_receipt_only(world: Path) -> None:
    before = visible(world)
    plan: Plan = dataclasses.replace(toy.rollback(world), edits=())
    journal.commit(world / "run", plan, logs=toy.logs(world))
    assert visible(world) == before
