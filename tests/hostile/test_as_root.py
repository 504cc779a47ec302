"""Root repairs a run of somebody who means harm: no secret gets out, no file changes its owner.

The attacker may do anything in his own run at any moment. He does it between two given calls, and,
in live races, whenever he gets to it."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, disk
from ckptsurgeon.disk import owners
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.transaction import lock
from tests.hostile.hostile_run import call
from tests.hostile.watched import load_everything
from tests.support.snapshot import HOME
from tests.support.tiny_run import make_run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root works in others' runs")
ATTACKER = 65534
SECRET = b"the secret of root alone"
SHARD = "checkpoint-8/optimizer.pt"
PLENTY = "lr=1e-5"


@pytest.fixture
def world() -> Iterator[Path]:
    """The attacker's run, and a file beside it that root alone may read."""
    load_everything()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        theirs = place / "theirs"
        make_run(theirs / "run", steps=(4, 8))
        for path in (theirs, *theirs.rglob("*")):
            os.chown(path, ATTACKER, ATTACKER)
        (place / "victim").mkdir()
        (place / "secret").write_bytes(SECRET)
        (place / "secret").chmod(0o600)
        yield place


def shared(world: Path) -> None:
    """The shard has a second name, so that it is copied."""
    os.link(world / "theirs/run" / SHARD, world / "theirs/backup")


def mixed(world: Path) -> None:
    """A part of the run is root's, so that root can't work as the owner of all."""
    os.chown(world / "theirs/run/checkpoint-8/scheduler.pt", 0, 0)


def leaked(folder: Path) -> list[Path]:
    """Files in which the attacker could read the secret."""
    found = []
    for path in folder.rglob("*"):
        info = path.lstat()
        his = info.st_uid == ATTACKER or info.st_mode & stat.S_IROTH
        if stat.S_ISREG(info.st_mode) and his and SECRET in path.read_bytes():
            found.append(path)
    return found


def kept(world: Path) -> None:
    """The secret is root's alone, under its one name, and nobody has a copy."""
    info = (world / "secret").lstat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode), info.st_nlink) == (0, 0o600, 1)
    assert (world / "secret").read_bytes() == SECRET
    assert leaked(world / "theirs") == []


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


# --- live races ----------------------------------------------------------------------------------


def attack(world: Path) -> None:
    """Without end, as the attacker: swap the shard for a link and back, put a file of root's in the
    place of each new name, and read all that can be read. What comes out is kept in `loot`."""
    os.setgroups([])
    os.setresgid(ATTACKER, ATTACKER, ATTACKER)
    os.setresuid(ATTACKER, ATTACKER, ATTACKER)
    run = world / "theirs/run"
    shard, real, roots = run / SHARD, world / "theirs/real", world / "theirs/of root"
    while True:
        with contextlib.suppress(OSError):
            shard.rename(real)
            shard.symlink_to(world / "secret")
        for path in (run / HOME).rglob("*"):
            try:
                if path.is_file() and SECRET in path.read_bytes():
                    (world / "theirs/loot").write_text(str(path))
                if path.name.startswith("lock."):
                    path.rename(world / "theirs/away")
                    roots.rename(path)
                    time.sleep(0.0005)
                    path.rename(roots)
            except OSError:
                continue
        time.sleep(0.0005)
        with contextlib.suppress(OSError):
            real.rename(shard)
        time.sleep(0.002)


def race(world: Path, rounds: int) -> int:
    """So many surgeries under attack; how many of them were done."""
    run = world / "theirs/run"
    roots = world / "theirs/of root"
    roots.write_bytes(b"of root alone")
    roots.chmod(0o600)
    attacker = os.fork()
    if attacker == 0:
        try:
            attack(world)
        finally:
            os._exit(1)
    done = 0
    try:
        for number in range(rounds):
            done += call("set", f"lr={number + 1}e-6", "-C", run, "--yes")[0] == 0
            call("recover", "-C", run)
            assert not (world / "theirs/loot").exists(), "a secret was read"
            for path in (world / "theirs").rglob("*"):
                try:
                    ours = path.lstat().st_ino == roots_inode(world)
                    assert not ours or path.lstat().st_uid == 0, "a file of root was given away"
                except FileNotFoundError:
                    continue
    finally:
        os.kill(attacker, 9)
        os.waitpid(attacker, 0)
    info = (world / "secret").lstat()
    assert (info.st_uid, stat.S_IMODE(info.st_mode), info.st_nlink) == (0, 0o600, 1)
    assert leaked(world / "theirs") == []
    return done


_inodes: dict[Path, int] = {}


def roots_inode(world: Path) -> int:
    """The file of root that the attacker moves about."""
    if world not in _inodes:
        _inodes[world] = (world / "theirs/of root").lstat().st_ino
    return _inodes[world]


@pytest.mark.parametrize("whose", ["the owner's", "mixed"])
def test_a_live_race_gets_nothing(world: Path, whose: str) -> None:
    shared(world)
    if whose == "mixed":
        mixed(world)
    race(world, 25)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["the owner's", "mixed"])
def test_a_long_live_race_gets_nothing(world: Path, whose: str) -> None:
    shared(world)
    if whose == "mixed":
        mixed(world)
    race(world, 500)
