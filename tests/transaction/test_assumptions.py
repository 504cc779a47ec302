"""What must hold before a plan is committed; refused, it leaves every byte as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.edits import Append, Content, Edit, Move, Replace, Span
from ckptsurgeon.plans.plan import Fingerprint, Plan
from ckptsurgeon.transaction import journal
from ckptsurgeon.transaction.space import refuse_full
from tests.faults import toy
from tests.faults.inject import Fault, count_calls, hooked, outcome
from tests.faults.world import restore, save, workplace
from tests.support.snapshot import HOME, Snapshot, snapshot


@pytest.fixture
def world() -> Iterator[Path]:
    with workplace() as place:
        toy.build(place)
        yield place


def refused(world: Path, plan: Plan, why: str, logs: Sequence[Path] | None = None) -> SurgeryError:
    """The plan is refused with these words, and nothing is changed."""
    before, time = snapshot(world, own=True), (world / "run").stat().st_mtime_ns
    with pytest.raises(SurgeryError, match=why) as caught:
        journal.commit(world / "run", plan, logs=toy.logs(world) if logs is None else logs)
    assert caught.value.exit_code == 1
    assert snapshot(world, own=True) == before
    assert (world / "run").stat().st_mtime_ns == time
    return caught.value


def planned(world: Path, *edits: Edit, assumes: tuple[Fingerprint, ...] = ()) -> Plan:
    return dataclasses.replace(toy.rollback(world), edits=edits, assumes=assumes)


def replacement(file: str, content: Content | None = None, kept: str = "kept") -> Replace:
    content = content or Content((b"new",))
    return Replace(file, f"{HOME}/staging/0001/{file}", f"{HOME}/attic/0001/{kept}", content)


# --- the run changed since the plan --------------------------------------------------------------

CHANGES: dict[str, Callable[[Path], object]] = {
    "a shard was written": lambda run: (run / "step100/shard1").write_bytes(b"saved again"),
    "a shard was touched": lambda run: os.utime(run / "step100/shard2"),
    "a shard was replaced": lambda run: (
        shutil.copy2(run / "step200/shard0", run / "step100/x")
        and (run / "step100/x").rename(run / "step100/shard0")
    ),
    "a shard is gone": lambda run: (run / "step100/shard0").unlink(),
    "a file came": lambda run: (run / "step100/shard9").write_bytes(b""),
    "the pointer moved": lambda run: (run / "latest").write_text("step201"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_changed_since_the_plan_is_refused(world: Path, change: str) -> None:
    plan = toy.rollback(world)
    CHANGES[change](world / "run")
    caught = refused(world, plan, "since the plan")
    assert "it plans anew" in caught.next[0]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.long
def test_a_change_at_any_call_before_the_commit_is_noticed(world: Path, change: str) -> None:
    """Another process writes between two calls of ours: nothing of the plan is done, and nothing
    of what the other one wrote is lost."""
    saved = save(world)
    commit = count_calls(lambda: toy.act_rollback(world)).index("rename journal.new", 12) + 1
    for at in range(1, commit, 5):
        restore(saved, world)
        plan = toy.rollback(world)
        with hooked(_at(at, lambda: CHANGES[change](world / "run"))), pytest.raises(SurgeryError):
            journal.commit(world / "run", plan, logs=toy.logs(world))
        found = snapshot(world, own=True)
        restore(saved, world)
        CHANGES[change](world / "run")
        assert _bytes(found) == _bytes(snapshot(world, own=True)), f"changed before call {at}"


def _at(number: int, call: Callable[[], object]) -> Callable[..., None]:
    calls = 0

    def hook(operation: str, path: str, details: Mapping[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            call()

    return hook


def _bytes(found: Snapshot) -> dict[str, str]:
    return {name: content for name, (_, content, _) in found.items()}


def test_a_file_that_was_absent_must_stay_absent(world: Path) -> None:
    absent = Fingerprint("note", 0, 0, 0, 0)
    staged = f"{HOME}/staging/0001/note"
    plan = planned(world, Move(staged, "note", Content((b"x",))), assumes=(absent,))
    (world / "run/note").write_text("mine")
    refused(world, plan, "exists, but did not when the plan was made")


def test_a_refused_plan_can_be_applied_once_the_cause_is_gone(world: Path) -> None:
    """Our own lock and staging, come and gone, do not make the plan stale."""
    plan = toy.rollback(world)
    with hooked(_at(40, _full)), pytest.raises(SurgeryError, match="No space left"):
        journal.commit(world / "run", plan, logs=toy.logs(world), jobs=1)
    journal.commit(world / "run", plan, logs=toy.logs(world))


def _full() -> None:
    raise OSError(28, "No space left on device")


def test_a_plan_for_another_id_is_stale(world: Path) -> None:
    plan = dataclasses.replace(toy.rollback(world), id="0007")
    refused(world, plan, "as surgery 0007, but the next surgery is 0001")


# --- edits that can't be done --------------------------------------------------------------------


def test_an_append_past_a_hard_link_is_refused(world: Path) -> None:
    plan = planned(world, Append.of("step100/shard3", 96, ((200, b"x"),), 0))
    refused(world, plan, r"shard3 has 2 names \(hard links\)")


def test_an_append_to_a_symbolic_link_is_refused(world: Path) -> None:
    (world / "run/alias").symlink_to("step100/shard0")
    refused(world, planned(world, Append.of("alias", 96, ((200, b"x"),), 0)), "not a regular file")


def test_an_append_to_a_file_of_another_size_is_refused(world: Path) -> None:
    size = (world / "run/step100/shard0").stat().st_size
    plan = planned(world, Append.of("step100/shard0", size - 1, ((200, b"x"),), 0))
    refused(world, plan, f"shard0 has {size} bytes, not the {size - 1} of the plan")


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        ((Move("gone", "there"),), "gone does not exist"),
        ((Move("latest", "iteration.txt"),), "in the way"),
        ((Move("latest", "a"), Move("a", "b")), "a does not exist"),
        ((Move("latest", "a"), Move("iteration.txt", "a")), "two edits of one plan"),
        ((Move("latest", "b"), replacement("latest")), "two edits of one plan"),
        ((Move("latest", "b"), Move("iteration.txt", "latest"), Move("latest", "c")), "two edits"),
        ((Move("step200", "b"), replacement("step200/shard0")), "two edits of one plan"),
        (
            (replacement("latest"), Append.of("latest", 7, ((20, b"x"),), 0)),
            "two edits of one plan",
        ),
        ((replacement("gone"),), "gone does not exist"),
        ((replacement("latest"), replacement("iteration.txt")), "two edits of one plan"),
        (
            (Replace("latest", f"{HOME}/attic/0001/none", f"{HOME}/attic/0002/kept"),),
            "none does not exist",
        ),
        ((replacement("latest", Content((Span("latest", 0, 99),))),), "and the plan reads 0 to 99"),
        ((replacement("step100"),), "not a regular file"),
    ],
)
def test_edits_that_clash_or_lack_a_file_are_refused(
    world: Path, edits: tuple[Edit, ...], why: str
) -> None:
    refused(world, planned(world, *edits), why)


def test_a_staged_file_that_is_there_already_is_refused(world: Path) -> None:
    staged = world / "run" / HOME / "staging/0001/latest"
    staged.parent.mkdir(parents=True)
    staged.write_text("whose?")
    refused(world, planned(world, replacement("latest")), "in the way of the staged one")


# --- rights --------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
@pytest.mark.parametrize("locked", ["run/step200/shard0", "run", "run/step200"])
def test_missing_rights_are_found_before_the_commit(world: Path, locked: str) -> None:
    """Another user, who owns all but one file or directory, is refused with exit 1."""
    everything = [world, *world.rglob("*")]
    for path in everything:
        os.chown(path, 65534, 65534)
    os.chown(world / locked, 0, 0)
    before = snapshot(world, own=True)

    def as_another_user() -> None:
        os.setuid(65534)
        journal.commit(world / "run", toy.set_lr(world), jobs=1)

    ended = outcome(as_another_user, Fault("KILL", 10**6))
    assert ended.code == 1, ended.told
    assert snapshot(world, own=True) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_a_folder_that_this_user_may_not_move_is_found_before_the_commit(world: Path) -> None:
    """To get another parent a folder is written to itself: its `..` changes."""
    for path in [world, *world.rglob("*")]:
        os.chown(path, 65534, 65534)
    os.chown(world / "run/step200", 0, 0)
    before = snapshot(world, own=True)

    def as_another_user() -> None:
        os.setuid(65534)
        plan = planned(world, Move("step200", f"{HOME}/attic/0001/step200"))
        journal.commit(world / "run", plan, logs=toy.logs(world), jobs=1)

    ended = outcome(as_another_user, Fault("KILL", 10**6))
    assert ended.code == 1, ended.told
    assert snapshot(world, own=True) == before


# --- space ---------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB and 100 inodes."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=100", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_plan_that_does_not_fit_is_refused_before_the_first_byte(small_disk: Path) -> None:
    toy.build(small_disk)
    plan = planned(small_disk, replacement("latest", Content((bytes(300_000),))))
    calls = []
    with hooked(lambda *call: calls.append(call)):
        caught = refused(small_disk, plan, "needs 3.*bytes of free space, and there are")
    assert not calls
    assert "free some space" in caught.next[0] and "prune --dry-run" in caught.next[1]


def test_a_write_between_two_holes_takes_a_block(small_disk: Path) -> None:
    """100 headers of 100 bytes: 10 kB of bytes, and 400 kB on the disk."""
    toy.build(small_disk)
    size = (small_disk / "run/step100/shard0").stat().st_size
    for pitch, fits in ((1000, True), (100_000, False)):
        writes = [(size + pitch * number, b"x" * 100) for number in range(1, 101)]
        plan = planned(small_disk, Append.of("step100/shard0", size, writes, 0))
        if fits:
            refuse_full(small_disk / "run", plan.edits, HOME)
        else:
            refused(small_disk, plan, "needs 4.*bytes of free space")


def test_a_plan_that_needs_too_many_files_is_refused(small_disk: Path) -> None:
    toy.build(small_disk)
    names = [f"new{number}" for number in range(40)]
    moves = [Move(f"{HOME}/staging/0001/{name}", name, Content((b"",))) for name in names]
    refused(small_disk, planned(small_disk, *moves), "free inodes")


def test_one_on_a_disk_without_a_free_inode_leaves_the_run_as_it_was(small_disk: Path) -> None:
    toy.build(small_disk)
    plan = planned(small_disk, replacement("latest", Content((b"step100",))))
    with contextlib.suppress(OSError):
        for number in range(100):
            (small_disk / f"full{number}").touch()
    assert os.statvfs(small_disk).f_favail == 0
    before = snapshot(small_disk, own=True)
    refused(small_disk, plan, "No space left on device")
    assert snapshot(small_disk, own=True) == before


def test_another_file_system_is_refused_for_a_rename(world: Path, small_disk: Path) -> None:
    target = os.path.relpath(small_disk / "tfevents", world / "run")
    plan = planned(world, Move("latest", target))
    refused(world, plan, "different file systems", [small_disk.resolve()])


def test_another_mount_of_one_file_system_is_refused_for_a_rename(small_disk: Path) -> None:
    """rename(2) fails between two mounts of one file system too: same device, other mount."""
    toy.build(small_disk)
    other = small_disk / "run/bound"
    other.mkdir()
    subprocess.run(["mount", "--bind", str(small_disk / "logs"), str(other)], check=True)
    try:
        plan = planned(small_disk, Move("bound/tfevents", f"{HOME}/attic/0001/events"))
        refused(small_disk, plan, "different file systems")
    finally:
        subprocess.run(["umount", str(other)], check=True)


def test_a_disk_that_fills_up_meanwhile_is_taken_back(small_disk: Path) -> None:
    """A real ENOSPC in the middle of the staging."""
    toy.build(small_disk)
    run = small_disk / "run"
    before = snapshot(small_disk, own=True)

    def fill() -> None:
        with (small_disk / "filler").open("wb", buffering=0) as file:
            for _ in range(2):  # the first write may be short; the second one fails
                try:
                    file.write(bytes(256 << 10))
                except OSError:
                    return

    with hooked(_at(45, fill)), pytest.raises(SurgeryError, match="No space left") as caught:
        journal.commit(run, toy.rollback(small_disk), logs=toy.logs(small_disk), jobs=1)
    assert caught.value.exit_code == 1 and "free some space" in caught.value.next[0]
    assert "prune --dry-run" in caught.value.next[1]
    (small_disk / "filler").unlink()
    assert snapshot(small_disk, own=True) == before
