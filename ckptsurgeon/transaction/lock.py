"""One surgeon at a time, by a lock record that also holds where flock does not (NFS, Lustre).

A record is written to a private file and linked to `<root>/.ckptsurgeon/lock`: link(2) succeeds
for one process only, and the record is complete before anyone can see it. A record is stale only
when its process is provably gone: same host and pid namespace, and another boot, no such pid, or a
pid that started at another time. There are no time-outs: a long surgery is not a dead one.

Whoever finds a stale record first claims the right to remove it, by a link that is named after the
record's token. A token is used once, so a claim is won once, and nobody can remove by mistake a
lock that was taken in between. A claimant that dies is stale itself and has an heir by the same
rule. The record is evidence about well-behaved hosts, not proof: hosts that share a name and a
pid namespace number but not their processes can't be told apart.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ckptsurgeon import disk, whole_file
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.hints import Hint, again, command, shell
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.plans.record_types import made
from ckptsurgeon.remote import reads
from ckptsurgeon.transaction import process
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.worker import as_owner

ATTEMPTS = 200
PAUSE_S = 0.002
"""How often, and how far apart, to look again while others take, break or release the lock."""

TOKEN = re.compile(r"[0-9a-f]{16}")
"""How the token of a record is written."""

LEASE_S = 900
"""In a bucket, seconds by the store's clock after which a lock that was not renewed is worth
nothing."""
MAX_BYTES = 1 << 16
"""Bytes of a record: its title is a sentence."""


@frozen
class Holder:
    """Who holds the lock. `start` is in clock ticks since boot; "" or 0 means unknown. `uid` is for
    the person who reads the record."""

    token: str
    host: str
    boot: str
    namespace: int
    pid: int
    start: int
    uid: int
    title: str
    time: str

    def __str__(self) -> str:
        title, host, time = (
            text if text.isprintable() else repr(text)
            for text in (self.title, self.host, self.time)
        )
        return f"“{title}” on {host} (process {self.pid}, since {time})"


_UNREADABLE = Holder("", "an unknown host", "", 0, 0, 0, 0, "unreadable lock record", "?")


LOCK, WATCHER = "lock", "watcher"
"""The lock of surgeries, and the one of who watches the run."""


def holder(root: Path, name: str = LOCK) -> Holder | None:
    """Who holds a lock of this run now, dead or alive; None when nobody does."""
    return _read(root / HOME / name)


def alive(root: Path, name: str = LOCK) -> Holder | None:
    """Who holds a lock now, unless it is a process of this machine that is provably gone."""
    record = holder(root, name)
    gone = record is None or stale(record) or (reads.age(root / HOME / name) or 0) > LEASE_S
    return None if gone else record


def refuse_held(root: Path) -> None:
    """Raise SurgeryError while another surgery holds the lock."""
    record = alive(root)
    if record is not None:
        raise refusal(root / HOME / "lock", record)


@contextlib.contextmanager
def hold(root: Path, title: str, name: str = LOCK) -> Iterator[None]:
    """Hold a lock of the run at `root`; leave no trace of it, nor of a `.ckptsurgeon` that it
    made and nobody filled.

    Raises SurgeryError when another surgery holds it, OSError when it can't be written, and
    InterruptedSurgery when it can't be removed."""
    home = root / HOME
    mine = myself(title)
    root_time = None if disk.is_there(home) else root.stat().st_mtime_ns
    try:
        _take(home / name, mine)
        yield
    finally:
        try:
            _release(home / name, mine, root_time)
        except (OSError, KeyboardInterrupt) as error:
            raise InterruptedSurgery(
                f"the lock {home / name} could not be removed: {error or 'interrupted'}",
                untouched="no edit of this surgery was lost",
                next=command("recover", why="remove it"),
            ) from error


def unlock(root: Path, expected: Holder | None = None) -> str:
    """Remove the lock of `expected` (of whoever holds it, when None), and say who it was.

    For a lock of another host, after the user has made sure that nothing runs there. Raises
    SurgeryError when there is no lock, when it is another one by now, when its holder is provably
    alive on this machine, or when it can't go."""
    home = root / HOME
    record = _read(home / "lock")
    if record is None:
        raise SurgeryError(f"there is no lock in {home}", next=command("status"))
    if expected is not None and record.token != expected.token:
        raise SurgeryError(
            f"another surgery holds the lock now: {record}",
            next=command("status", why="see who works on the run"),
        )
    if _lives(record):
        raise SurgeryError(
            f"the surgery that holds the lock is alive on this machine: {record}",
            next=(
                f"wait until it ends    it may be stopped (Ctrl-Z): then kill -CONT {record.pid}",
                shell(["kill", record.pid], why="if it hangs"),
                command("recover", why="once it is gone"),
            ),
        )
    with as_owner(root, []):
        _remove_dead(home, record)
    return str(record)


def _remove_dead(home: Path, record: Holder) -> None:
    mine = myself("unlock")
    private = home / f"lock.{mine.token}"
    try:
        disk.write_new(private, encoded(mine))
        if not _break(home / LOCK, record, private):
            raise SurgeryError(
                f"the lock of {record} is being removed by another process",
                next=command("status", why="see whether it is gone"),
            )
        _release(home / LOCK, mine, None)
    except OSError as error:
        raise SurgeryError(
            f"{error.filename}: {error.strerror}: the lock stays",
            next=again(why="once the cause is removed"),
        ) from error
    finally:
        with contextlib.suppress(OSError):
            _remove(private)


# --- taking and releasing ------------------------------------------------------------------------


def _take(lock: Path, mine: Holder) -> None:
    home = lock.parent
    private = home / f"{lock.name}.{mine.token}"
    for _ in range(ATTEMPTS):
        record = _read(lock)
        if record is not None and not stale(record):
            raise refusal(lock, record)
        try:
            if not disk.is_folder(home):
                with contextlib.suppress(FileExistsError):
                    disk.make_directory(home)
            if not disk.is_there(private):
                disk.write_new(private, encoded(mine))
            if record is not None:
                _break(lock, record, private)
            elif _claim(lock, private):
                _tidy(lock)
                return
        except FileNotFoundError:
            pass  # the last holder removed its empty home, or tidied our private file away
        time.sleep(PAUSE_S)
    raise SurgeryError(f"{lock}: too many surgeries start at once", next=again())


def _release(lock: Path, mine: Holder, root_time: int | None) -> None:
    home, record = lock.parent, _read(lock)
    if record is not None and record.token == mine.token:
        disk.remove_file(lock)
    _remove(lock.parent / f"{lock.name}.{mine.token}")
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        if disk.is_folder(home) and not any(home.iterdir()):
            try:
                disk.remove_directory(home)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
            else:
                if root_time is not None:
                    disk.set_times(home.parent, root_time)


def _claim(name: Path, private: Path) -> bool:
    """Make `name` ours if nobody has it. True: it is ours."""
    try:
        disk.link(private, name)
    except FileExistsError:
        return _is_same(name, private)
    except OSError as error:
        if not disk.can_not_link(error, name.parent):
            raise
        try:
            disk.write_new(name, private.read_bytes())
        except FileExistsError:
            return _is_same(name, private)
    return True


def _is_same(name: Path, private: Path) -> bool:
    """Whether a name that is there is ours all the same: the answer to a link over NFS can get
    lost."""
    record, mine = _read(name), _read(private)
    return record is not None and mine is not None and record.token == mine.token


def _break(lock: Path, victim: Holder, private: Path) -> bool:
    """Remove `lock`, held by `victim`, if this process wins the claim to. True: it is gone."""
    claims = []
    heir = victim
    while True:
        claim = lock.parent / f"{lock.name}.{heir.token}.heir"
        if _claim(claim, private):
            claims.append(claim)
            break
        other = _read(claim)
        if other is None or not stale(other):
            return False
        claims.append(claim)
        heir = other
    try:
        # A claim can be won after the break is over; then the lock is another one by now.
        record = _read(lock)
        if record is not None and record.token == victim.token:
            disk.remove_file(lock)
    finally:
        for claim in claims:
            _remove(claim)
    return True


def _tidy(lock: Path) -> None:
    """Remove what dead processes left beside the lock. A live one that loses its private file
    tries again, and a claim whose victim is gone is worth nothing."""
    for name in sorted(entry.name for entry in lock.parent.iterdir()):
        if name.startswith(f"{lock.name}."):
            _remove(lock.parent / name)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if disk.is_there(path):
            disk.remove_file(path)


def refusal(lock: Path, record: Holder) -> SurgeryError:
    """What is said to who comes second."""
    if record.host == os.uname().nodename and record.namespace == process.namespace():
        follow: Hint = "wait until it ends, then run the same command again"
    else:
        follow = command("unlock", why="remove it, once you are sure that nothing runs there")
    if reads.current() is not None:
        follow = f"wait until it ends; one that died is forgotten after {LEASE_S // 60} minutes"
    if lock.name == WATCHER:
        follow = shell(["rm", lock], why="once you are sure that nothing runs there")
        return SurgeryError(f"{lock}: another process watches this run: {record}", next=follow)
    return SurgeryError(f"{lock}: another surgery is under way: {record}", next=follow)


# --- records -------------------------------------------------------------------------------------


def myself(title: str) -> Holder:
    """The record of this process, with a token of its own."""
    return Holder(
        token=os.urandom(8).hex(),
        host=os.uname().nodename,
        boot=process.boot(),
        namespace=process.namespace(),
        pid=os.getpid(),
        start=process.start(os.getpid()) or 0,
        uid=os.getuid(),
        title=title,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def encoded(record: Holder) -> bytes:
    """The bytes of a record."""
    return json.dumps(asdict(record)).encode()


def decoded(data: bytes) -> Holder:
    """The record in these bytes. Raises ValueError, TypeError or AttributeError where there is
    none."""
    record = made(Holder, json.loads(data))
    # The token becomes part of a file name, the number of the process goes to the kernel.
    sound = TOKEN.fullmatch(record.token) and 0 <= record.pid < 1 << 31
    return record if sound else _UNREADABLE


def _read(path: Path) -> Holder | None:
    """The record at `path`, or None when there is no such file.

    An incomplete record is looked at again: without hard links it is not written in one step."""
    for _ in range(10):
        try:
            return decoded(whole_file.read(path, MAX_BYTES, follow=False))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError, RecursionError):
            time.sleep(PAUSE_S)
        except OSError as error:
            if error.errno not in whole_file.UNLIKE:
                raise
            return _UNREADABLE
    return _UNREADABLE


def _lives(record: Holder) -> bool:
    """Whether its process is provably the one that runs here now."""
    if record.host != os.uname().nodename or record.namespace != process.namespace():
        return False
    same_boot = bool(record.boot) and record.boot == process.boot()
    return same_boot and record.start > 0 and process.start(record.pid) == record.start


def stale(record: Holder) -> bool:
    """Whether its process is provably gone."""
    if record.host != os.uname().nodename or record.namespace != process.namespace():
        return False
    if record.boot and process.boot() and record.boot != process.boot():
        return True
    return record.pid > 0 and process.is_gone(record.pid, record.start)
