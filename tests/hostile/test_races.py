"""Root repairs a run whose owner attacks at each call that makes a file: live races, by inotify.

A surgery may fail then, and be recovered; no secret gets out, and no file changes its owner."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.inject import hooked
from tests.hostile.hostile_run import call
from tests.hostile.inotify import Watch
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
ROOTS = b"of root alone"
WAIT = 0.002
"""Seconds that a slow disk takes for a write, so that the attacker gets to it."""


@contextlib.contextmanager
def made_world() -> Iterator[Path]:
    """The attacker's run, with the folder that he watches and a file of root's that he may move."""
    with others_run() as place:
        home = place / "theirs/run" / HOME
        home.mkdir()
        os.chown(home, ATTACKER, ATTACKER)
        (place / "of root").write_bytes(ROOTS)
        (place / "of root").chmod(0o600)
        shared(place)
        yield place


@pytest.fixture
def world() -> Iterator[Path]:
    with made_world() as place:
        yield place


def swap_the_name(world: Path, path: Path) -> None:
    """A file of root's takes the name of the lock's record, between its making and its giving."""
    roots, away = world / "theirs/of root", world / "theirs/away"
    if path.name.startswith("lock."):
        path.rename(away)
        roots.rename(path)
        struck(world)
        time.sleep(2 * WAIT)
        path.rename(roots)


def swap_the_shard(world: Path, path: Path) -> None:
    """The shard becomes a link to the secret, between the making of its copy and the copying."""
    shard, real = world / "theirs/run" / SHARD, world / "theirs/real"
    if "staging" in path.parts:
        shard.rename(real)
        try:
            shard.symlink_to(world / "secret")
            struck(world)
            time.sleep(2 * WAIT)
        finally:
            real.rename(shard)


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "a new name": swap_the_name,
    "the shard": swap_the_shard,
}


def struck(world: Path) -> None:
    with (world / "theirs/strikes").open("ab") as file:
        file.write(b".")


def strikes(world: Path) -> int:
    path = world / "theirs/strikes"
    return path.stat().st_size if path.exists() else 0


def attack(world: Path, act: Callable[[Path, Path], None]) -> None:
    """Without end, as the attacker. A secret that he can read is kept in `loot`."""
    os.setgroups([])
    os.setresgid(ATTACKER, ATTACKER, ATTACKER)
    os.setresuid(ATTACKER, ATTACKER, ATTACKER)
    watch = Watch(world / "theirs/run")
    (world / "theirs/ready").touch()
    for path, new in watch.files():
        with contextlib.suppress(OSError):
            if new:
                act(world, path)
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if SECRET in data or ROOTS in data:
                (world / "theirs/loot").write_text(str(path))


@contextlib.contextmanager
def attacked(world: Path, act: Callable[[Path, Path], None]) -> Iterator[None]:
    attacker = os.fork()
    if attacker == 0:
        try:
            attack(world, act)
        finally:
            os._exit(1)
    try:
        while not (world / "theirs/ready").exists():
            assert os.waitpid(attacker, os.WNOHANG) == (0, 0), "the attacker could not begin"
            time.sleep(0.001)
        yield
        assert os.waitpid(attacker, os.WNOHANG) == (0, 0), "the attacker gave up"
    finally:
        os.kill(attacker, 9)
        os.waitpid(attacker, 0)


def slowly(operation: str, path: str, details: Mapping[str, Any]) -> None:
    """A hook: a disk on which a write takes long."""
    if operation in ("write", "clone", "copy"):
        time.sleep(WAIT)


def made_ready(world: Path) -> None:
    """What an attack left is gone: a lock that is none refuses every surgery, and a file of root's
    that took its name was removed with it."""
    for path in (world / "theirs/run" / HOME).glob("lock*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):
        os.link(world / "of root", world / "theirs/of root")


def race(world: Path, act: Callable[[Path, Path], None], rounds: int) -> None:
    """So many surgeries under attack, every second one on a slow disk."""
    run, roots = world / "theirs/run", (world / "of root").stat().st_ino
    with attacked(world, act):
        for number in range(40 * rounds):  # he gets to it seldom where others work, too
            if number >= rounds and strikes(world) >= rounds // 10:
                break
            made_ready(world)
            with hooked(slowly if number % 2 else None):
                call("set", f"lr={number + 1}e-6", "-C", run, "--yes")
            call("recover", "-C", run)
            assert not (world / "theirs/loot").exists(), "a secret was read"
            for path in (world / "theirs").rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    info = path.lstat()
                    right = (info.st_uid, stat.S_IMODE(info.st_mode)) == (0, 0o600)
                    assert info.st_ino != roots or right, "a file of root was given away"
    kept(world)
    assert leaked(world / "theirs") == []
    assert strikes(world) >= rounds // 10, "he hardly ever got to it"


@pytest.mark.parametrize(
    ("worlds", "rounds"), [(1, 10), pytest.param(40, 25, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("whose", ["the owner's", "mixed"])
@pytest.mark.parametrize("act", ATTACKS)
@pytest.mark.long
def test_a_live_race_gets_nothing(act: str, whose: str, worlds: int, rounds: int) -> None:
    """In worlds that are made anew: he reads each file whole, and in one that has grown by hundreds
    of surgeries he comes too late."""
    for _ in range(worlds):
        with made_world() as world:
            if whose == "mixed":
                mixed(world)
            race(world, ATTACKS[act], rounds)


def test_an_attacker_reads_what_is_given_away(world: Path) -> None:
    """The watch sees a secret that lies open only for a moment."""
    staging = world / "theirs/run" / HOME / "staging/0001"
    with attacked(world, swap_the_shard):
        staging.mkdir(parents=True)
        for _ in range(100):
            (staging / "copy").write_bytes(SECRET)
            time.sleep(0.001)
            (staging / "copy").unlink()
        deadline = time.monotonic() + 60
        while not (world / "theirs/loot").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
    assert (world / "theirs/loot").exists()
