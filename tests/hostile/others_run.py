"""The run of somebody who means harm, in which root works, and what must stay root's own."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hostile.watched import load_everything
from tests.support.tiny_run import make_run

ATTACKER = 65534
SECRET = b"the secret of root alone"
SHARD = "checkpoint-8/optimizer.pt"


@contextmanager
def others_run() -> Iterator[Path]:
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
