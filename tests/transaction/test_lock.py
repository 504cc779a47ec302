"""The lock: one surgeon at a time, no trace, and only what is provably dead is broken."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.transaction import lock, process
from ckptsurgeon.transaction.home import HOME
from tests.faults.inject import Fault, count_calls, exited, hooked, outcome
from tests.faults.world import workplace
from tests.support.launch import REPO
from tests.support.snapshot import snapshot


@contextmanager
def another(root: Path) -> Iterator[tuple[str, int]]:
    """Another process that tries to take the lock and keeps it: what it says, and its pid."""
    command = [sys.executable, "-m", "tests.faults.contend", "wait", str(root)]
    with subprocess.Popen(
        command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        yield other.stdout.readline().strip(), other.pid


def leave(root: Path, **other: Any) -> lock.Holder:
    """A lock record that differs from one of this process in `other`."""
    record = dataclasses.replace(lock.myself("rollback 300 → 200"), **other)
    home = root / HOME
    home.mkdir(exist_ok=True)
    (home / "lock").write_bytes(lock.encoded(record))
    return record


def held(root: Path) -> None:
    with lock.hold(root, "test"):
        pass


# --- no trace ------------------------------------------------------------------------------------


def test_release_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step100")
    before, time = snapshot(tmp_path, own=True), tmp_path.stat().st_mtime_ns
    with lock.hold(tmp_path, "test"):
        assert lock.holder(tmp_path) is not None
    assert snapshot(tmp_path, own=True) == before
    assert tmp_path.stat().st_mtime_ns == time
    assert lock.holder(tmp_path) is None


def test_a_home_with_receipts_stays(tmp_path: Path) -> None:
    (tmp_path / HOME / "receipts").mkdir(parents=True)
    held(tmp_path)
    assert snapshot(tmp_path, own=True).keys() == {".ckptsurgeon", ".ckptsurgeon/receipts"}


def test_a_disk_error_at_any_call_leaves_no_trace_or_says_so(tmp_path: Path) -> None:
    calls = count_calls(lambda: held(tmp_path))
    for at in range(1, len(calls) + 1):
        try:
            with hooked(Fault("ENOSPC", at)):
                held(tmp_path)
        except OSError:
            assert not list(tmp_path.iterdir()), calls[at - 1]
        except SurgeryError as error:
            assert error.exit_code == 5
            with exited():
                held(tmp_path)
            assert not list(tmp_path.iterdir()), calls[at - 1]


# --- one at a time -------------------------------------------------------------------------------


def test_a_second_surgery_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    with another(tmp_path) as (said, pid):
        assert said == "held"
        with pytest.raises(SurgeryError, match=f"waits.*process {pid}") as caught:
            held(tmp_path)
        assert "wait until it ends" in caught.value.next[0]
    held(tmp_path)


def test_a_thread_of_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with lock.hold(tmp_path, "first"):
        with pytest.raises(SurgeryError, match="first"):
            held(tmp_path)
        assert lock.holder(tmp_path) is not None


@pytest.mark.long
def test_exactly_one_wins_whenever_another_comes(tmp_path: Path) -> None:
    """Another process takes its turn, as a whole, before each single call of ours, while both find
    the same stale lock: the moment at which the usual recipe lets both in."""
    leave(tmp_path, pid=_dead())
    calls = len(count_calls(lambda: held(tmp_path)))
    for at in range(1, calls + 1):
        leave(tmp_path, pid=_dead())
        ours, theirs = _race(tmp_path, at)
        assert ours != theirs, f"before call {at} of {calls}: ours {ours}, theirs {theirs}"
        held(tmp_path)


def _race(root: Path, at: int) -> tuple[bool, bool]:
    """Whether we held the lock, and whether another who came before call `at` keeps it too."""
    ours = theirs = False
    calls = 0
    with ExitStack() as stack:

        def hook(operation: str, path: str, details: Mapping[str, Any]) -> None:
            nonlocal calls, theirs
            calls += 1
            if calls == at and not ours:  # once we have it, our release is not their concern
                theirs = stack.enter_context(another(root))[0] == "held"

        with suppress(SurgeryError), hooked(hook), lock.hold(root, "ours"):
            ours = True
    return ours, theirs


@pytest.mark.parametrize("each", [300, pytest.param(1667, marks=pytest.mark.slow)])
@pytest.mark.long
def test_thousands_of_acquisitions_by_six_processes(each: int) -> None:
    with workplace() as root:
        command = [sys.executable, "-m", "tests.faults.contend", "contend", str(root), str(each)]
        processes = [
            subprocess.Popen([*command, str(seed)], cwd=REPO, stdout=subprocess.PIPE, text=True)
            for seed in range(6)
        ]
        results = [process.communicate()[0].split() for process in processes]
        assert sum(int(held) for held, _ in results) >= 6 * each
        assert [int(shared) for _, shared in results] == [0] * 6
        held(root)
        assert not list(root.iterdir())


# --- stale or not --------------------------------------------------------------------------------


def _dead() -> int:
    """The pid of a process that was, and is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        pass
    return other.pid


def test_the_lock_of_a_killed_process_is_broken(tmp_path: Path) -> None:
    ended = outcome(lambda: held(tmp_path), Fault("KILL", 6))
    assert ended.code == -9
    assert (tmp_path / ".ckptsurgeon/lock").exists()
    held(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_zombie_is_broken(tmp_path: Path) -> None:
    """A container without an init keeps a killed surgeon as a zombie."""
    surgeon = subprocess.Popen(["sleep", "60"])
    start = process.start(surgeon.pid)
    assert start
    for known in (start, 0):
        leave(tmp_path, pid=surgeon.pid, start=known)
        with pytest.raises(SurgeryError, match="under way"):
            held(tmp_path)
    surgeon.kill()
    os.waitid(os.P_PID, surgeon.pid, os.WEXITED | os.WNOWAIT)
    for known in (start, 0):
        leave(tmp_path, pid=surgeon.pid, start=known)
        held(tmp_path)
    surgeon.wait()


def test_a_process_whose_first_thread_has_ended_is_alive(tmp_path: Path) -> None:
    """/proc calls it a zombie, too."""
    wait = "threading.Thread(target=time.sleep, args=(60,)).start()"
    end = "ctypes.CDLL(None).pthread_exit(None)"
    command = [sys.executable, "-c", f"import ctypes, threading, time; {wait}; {end}"]
    with subprocess.Popen(command) as surgeon:
        while " Z " not in Path(f"/proc/{surgeon.pid}/stat").read_text():
            assert surgeon.poll() is None
        start = process.start(surgeon.pid)
        assert start
        leave(tmp_path, pid=surgeon.pid, start=start)
        with pytest.raises(SurgeryError, match="under way"):
            held(tmp_path)
        surgeon.kill()


@pytest.mark.parametrize(
    "other",
    [{"boot": "another boot"}, {"start": 1}],
    ids=["the host was rebooted", "the pid belongs to a later process"],
)
def test_a_record_whose_process_is_gone_is_broken(tmp_path: Path, other: dict[str, Any]) -> None:
    leave(tmp_path, **other)
    held(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "other",
    [{"host": "node17"}, {"namespace": 1}, {"host": "node17", "boot": "another boot"}],
    ids=["another host", "another pid namespace", "another host, rebooted"],
)
def test_what_cant_be_seen_from_here_is_never_broken(tmp_path: Path, other: dict[str, Any]) -> None:
    record = leave(tmp_path, pid=_dead(), **other)
    with pytest.raises(SurgeryError, match=f"rollback 300 → 200.*{record.host}") as caught:
        held(tmp_path)
    assert "ckptsurgeon unlock" in caught.value.next[0]
    assert lock.holder(tmp_path) == record


def test_an_unreadable_record_is_never_broken(tmp_path: Path) -> None:
    (tmp_path / ".ckptsurgeon").mkdir()
    (tmp_path / ".ckptsurgeon/lock").write_bytes(b'{"token": "12')
    with pytest.raises(SurgeryError, match="unreadable") as caught:
        held(tmp_path)
    assert "ckptsurgeon unlock" in caught.value.next[0]


@pytest.mark.long
def test_a_breaker_that_died_has_an_heir(tmp_path: Path) -> None:
    """Killed at each call of breaking a stale lock; the next one still gets in, and tidies up."""
    leave(tmp_path, pid=_dead())
    calls = len(count_calls(lambda: held(tmp_path)))
    for at in range(1, calls + 1):
        leave(tmp_path, pid=_dead())
        assert outcome(lambda: held(tmp_path), Fault("KILL", at)).code == -9
        for again in range(at, 0, -2):
            assert outcome(lambda: held(tmp_path), Fault("KILL", again)).code in (-9, 0)
        held(tmp_path)
        assert not list(tmp_path.iterdir()), f"killed at {at}"


# --- unlock --------------------------------------------------------------------------------------


def test_unlock_removes_another_hosts_lock_and_says_whose_it_was(tmp_path: Path) -> None:
    leave(tmp_path, host="node17", pid=4242)
    assert "node17 (process 4242" in lock.unlock(tmp_path)
    held(tmp_path)


def test_unlock_spares_a_surgery_that_is_alive_here(tmp_path: Path) -> None:
    """Stopped, it looks dead, and goes on as soon as somebody lets it."""
    with another(tmp_path) as (said, pid):
        assert said == "held"
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(SurgeryError, match=f"alive on this machine.*{pid}") as caught:
                lock.unlock(tmp_path)
            assert f"kill {pid} " in caught.value.next[1]
            assert "ckptsurgeon recover" in caught.value.next[2]
        finally:
            os.kill(pid, signal.SIGCONT)
        record = lock.holder(tmp_path)
        assert record is not None and record.pid == pid


@pytest.mark.parametrize("other", [{"start": 1}, {"boot": "another"}, {"pid": 2**22 + 1}])
def test_unlock_removes_what_no_live_process_holds(tmp_path: Path, other: dict[str, Any]) -> None:
    """The number of this process, given to another before it, is not evidence."""
    leave(tmp_path, **other)
    lock.unlock(tmp_path)
    held(tmp_path)


def test_unlock_leaves_no_trace(tmp_path: Path) -> None:
    leave(tmp_path, host="node17")
    lock.unlock(tmp_path)
    assert not list(tmp_path.iterdir())


def test_unlock_spares_a_lock_that_the_user_has_not_seen(tmp_path: Path) -> None:
    seen = leave(tmp_path, host="node17")
    now = leave(tmp_path, host="node18")
    with pytest.raises(SurgeryError, match=r"another surgery holds the lock now.*node18"):
        lock.unlock(tmp_path, seen)
    assert lock.holder(tmp_path) == now


def test_unlock_on_a_failing_disk_says_that_the_lock_stays(tmp_path: Path) -> None:
    record = leave(tmp_path, host="node17")
    for kind in ("EROFS", "ENOSPC"):
        with hooked(Fault(kind, 1, sticky=True)), pytest.raises(SurgeryError, match="stays"):
            lock.unlock(tmp_path)
        assert lock.holder(tmp_path) == record


def test_unlock_removes_an_unreadable_record(tmp_path: Path) -> None:
    (tmp_path / ".ckptsurgeon").mkdir()
    (tmp_path / ".ckptsurgeon/lock").write_bytes(b"")
    lock.unlock(tmp_path)
    held(tmp_path)


def test_unlock_without_a_lock_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SurgeryError, match="no lock"):
        lock.unlock(tmp_path)
    assert not list(tmp_path.iterdir())


# --- file systems --------------------------------------------------------------------------------


def test_without_hard_links_the_record_is_created_alone(tmp_path: Path) -> None:
    with hooked(_no_links), lock.hold(tmp_path, "ours"):
        with pytest.raises(SurgeryError, match="ours"):
            held(tmp_path)
        record = json.loads((tmp_path / ".ckptsurgeon/lock").read_bytes())
        assert record["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def _no_links(operation: str, path: str, details: Mapping[str, Any]) -> None:
    if operation == "link":
        raise PermissionError(1, "Operation not permitted", path)


def test_a_record_says_nothing_about_the_environment(tmp_path: Path) -> None:
    with lock.hold(tmp_path, "test"):
        record = json.loads((tmp_path / ".ckptsurgeon/lock").read_bytes())
    assert record.keys() == {
        "token", "host", "boot", "namespace", "pid", "start", "uid", "title", "time",
    }  # fmt: skip
