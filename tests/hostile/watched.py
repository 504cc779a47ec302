"""Commands in runs of somebody else, under watch: nothing outside, no process, no traceback."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ckptsurgeon
from tests.hostile.hostile_run import call
from tests.hostile.lies import PRECIOUS

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
"""Audit events of a process that is started."""
Hook = Callable[[str, tuple[Any, ...]], None]


@functools.cache
def _hooks() -> list[Hook]:
    """The hooks at work. Python gives no audit hook back, so it gets one, which asks these."""
    hooks: list[Hook] = []

    def ask(event: str, details: tuple[Any, ...]) -> None:
        for hook in hooks:
            hook(event, details)

    sys.addaudithook(ask)
    return hooks


@contextlib.contextmanager
def audited(hook: Hook) -> Iterator[None]:
    """Call `hook` with each audit event meanwhile; what it raises, the audited call raises."""
    hooks = _hooks()
    hooks.append(hook)
    try:
        yield
    finally:
        hooks.remove(hook)


@contextlib.contextmanager
def no_process() -> Iterator[None]:
    """Fail if a process is started meanwhile."""
    started: list[str] = []

    def note(event: str, details: tuple[Any, ...]) -> None:
        if event in STARTS:
            started.append(f"{event}{details}")

    with audited(note):
        yield
    assert started == []


Seen = dict[str, tuple[Any, ...]]


def seen(folder: Path) -> Seen:
    """Everything in a folder: kind, rights, owner, size, times and bytes."""
    out: Seen = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        info = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        out[str(path)] = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, content)
    return out


def copies(root: Path) -> list[Path]:
    """Files of the run that have what is in the victim's."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if path.read_bytes() == PRECIOUS.encode()]


def words_in(root: Path, words: Sequence[str]) -> list[str]:
    """The command in this run, as a person types it; PLAN is the plan that lies there."""
    return [str(root / "plan.json") if word == "PLAN" else word for word in words] + [
        "-C", str(root),
    ]  # fmt: skip


def run_watched(root: Path, words: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command and what it said. The victim beside the run stays as it is."""
    victim = root.parent / "victim"
    before, beside = seen(victim), sorted(root.parent.iterdir())
    with no_process():
        status, out, said = call(*words_in(root, words))
    assert seen(victim) == before, f"{words} touched the victim\n{out}{said}"
    assert sorted(root.parent.iterdir()) == beside, f"{words} left something beside the run"
    assert not copies(root), f"{words} copied what the victim has\n{out}{said}"
    assert "Traceback" not in out + said
    assert status in (0, 1, 2, 4, 5), (status, said)
    return status, out + said


def load_everything() -> None:
    """Import the whole package: another user may not be able to read it."""
    for module in pkgutil.walk_packages(ckptsurgeon.__path__, "ckptsurgeon."):
        if not module.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(module.name)
    import encodings.ascii
    import encodings.idna
    import encodings.latin_1  # noqa: F401


def as_user(user: int, act: Callable[[], object]) -> None:
    """Done in a child that has the rights of this user alone. Fails with what it raises."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            act()
            code = 0
        except BaseException:
            os.write(write, traceback.format_exc()[-60_000:].encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        what = told.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, what
