"""Root repairs a run of somebody who means harm: no secret gets out, no file changes its owner.

The attacker may do anything in his own run at any moment; here he does it between two given calls.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, disk
from ckptsurgeon.disk import owners
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.transaction import lock
from tests.hostile.hostile_run import call
from tests.hostile.others_run import (
    ATTACKER,
    SECRET,
    SHARD,
    kept,
    leaked,
    mixed,
    others_run,
    shared,
)
from tests.support.snapshot import HOME

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root works in others' runs")
PLENTY = "lr=1e-5"


@pytest.fixture
def world() -> Iterator[Path]:
    with others_run() as place:
        yield place


# --- a fork --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["--copy", "--hard-link"])
@pytest.mark.parametrize("kind", ["relative", "absolute", "through another link"])
@pytest.mark.parametrize("where", ["theirs/fork", "victim/fork"])
def test_a_fork_copies_nothing_that_a_link_leads_to_outside(
    world: Path, how: str, kind: str, where: str
) -> None:
    note = world / "theirs/run/checkpoint-4/notes.txt"
    if kind == "through another link":
        (note.parent / "hop").symlink_to("../../..")
        note.symlink_to("hop/secret")
    else:
        note.symlink_to("../../../secret" if kind == "relative" else world / "secret")
    status, out, said = call(
        "fork", world / where, "--step", "4", how, "-C", world / "theirs/run"
    )  # fmt: skip
    kept(world)
    assert leaked(world / "victim") == []
    if status == 0:
        assert (world / where / "checkpoint-4/notes.txt").is_symlink(), out + said


# --- between two calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["the owner's", "mixed"])
def test_a_new_file_is_given_away_and_no_other_that_takes_its_name(
    world: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of the lock's record and its giving, another file takes its name."""
    if whose == "mixed":
        mixed(world)
    home = world / "theirs/run" / HOME
    home.mkdir()
    os.chown(home, ATTACKER, ATTACKER)
    roots = home / "of root"
    roots.write_bytes(SECRET)
    roots.chmod(0o600)
    swapped: list[str] = []
    give = owners.give

    def swap_then_give(descriptor: int) -> None:
        for path in sorted(home.glob("lock.*")):
            if roots.exists():
                path.rename(home / "away")
                roots.rename(path)
                swapped.append(path.name)
        give(descriptor)

    monkeypatch.setattr(owners, "give", swap_then_give)
    call("set", PLENTY, "-C", world / "theirs/run", "--yes")
    assert swapped
    moved = [path for path in home.iterdir() if path.is_file() and path.read_bytes() == SECRET]
    assert all(path.stat().st_uid == 0 for path in moved)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in moved)


@pytest.mark.parametrize("whose", ["the owner's", "mixed"])
@pytest.mark.long
def test_a_shard_that_becomes_a_link_is_not_copied(
    world: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call of a surgery in turn, until one of them finds the shard as it was."""
    shared(world)
    if whose == "mixed":
        mixed(world)
    run, swaps = world / "theirs/run", 0
    shard, real = run / SHARD, (run / SHARD).with_suffix(".real")

    def watch(at: int) -> Any:
        calls = 0

        def swap(operation: str, path: str, details: Any) -> None:
            nonlocal calls, swaps
            calls += 1
            assert leaked(world / "theirs") == [], (operation, path)
            if calls == at:
                shard.rename(real)
                shard.symlink_to(world / "secret")
                swaps += 1

        return swap

    for at in range(1, 60, 4):
        monkeypatch.setattr(disk.calls, "hook", watch(at))
        call("set", PLENTY, "-C", run, "--yes")
        monkeypatch.setattr(disk.calls, "hook", None)
        kept(world)
        if real.exists():
            if os.path.lexists(shard):
                shard.unlink()
            real.rename(shard)
        call("recover", "-C", run)
        if any((run / HOME / "receipts").glob("*")):
            call("undo", "-C", run, "--yes")
    assert swaps > 3


def test_root_copies_into_a_folder_only_what_its_owner_may_read(tmp_path: Path) -> None:
    """Whatever name led there: a surgery that can't work as the owner reads with root's rights."""
    source, folder = tmp_path / "private", tmp_path / "his"
    source.write_bytes(SECRET)
    folder.mkdir()
    os.chown(folder, ATTACKER, ATTACKER)
    for owner, mode, allowed in (
        (0, 0o600, False), (0, 0o640, False), (0, 0o644, True), (ATTACKER, 0o600, True),
    ):  # fmt: skip
        os.chown(source, owner, owner)
        source.chmod(mode)
        if allowed:
            os.close(disk.read_from(source, folder / "copy"))
        else:
            with pytest.raises(PermissionError):
                disk.read_from(source, folder / "copy")
    os.close(disk.read_from(source, tmp_path / "copy"))


def test_no_file_lends_its_rights_to_whoever_runs_it(world: Path) -> None:
    program = world / "victim/program"
    program.write_bytes(b"#!")
    program.chmod(0o6755)
    with disk.created(world / "theirs/new") as descriptor:
        disk.copy_rights(descriptor, world / "theirs/new", program.stat())
    assert stat.S_IMODE((world / "theirs/new").stat().st_mode) == 0o755


def test_what_root_makes_is_roots_alone_until_it_is_whole(world: Path) -> None:
    path = world / "theirs/new"
    with disk.created(path) as descriptor:
        info = path.stat()
        assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (0, 0o600)
        disk.fsync_file(descriptor, path)
        assert path.stat().st_uid == ATTACKER
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~owners.umask()


def test_a_plan_says_as_whom_root_works(world: Path) -> None:
    run = world / "theirs/run"
    words = ("set", PLENTY, "-n", "-C", run)
    assert "works as " in call(*words)[1]
    mixed(world)
    assert "works as root: " in call(*words)[1]


def test_the_rights_of_root_are_back_afterwards(world: Path) -> None:
    groups = os.getgroups()
    run = Run.open(world / "theirs/run")
    with pytest.raises(SurgeryError), lock.hold(run.root, "another"):
        (run.root / HOME / "lock").stat()
        with lock.hold(run.root, "one more"):
            pass
    call("set", PLENTY, "-C", run.root, "--yes")
    assert (os.geteuid(), os.getegid(), os.getgroups()) == (0, os.getgid(), groups)
