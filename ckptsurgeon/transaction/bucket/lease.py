"""One surgeon at a time in a bucket: who creates the object `lock` holds it, and renews it.

A lock is worth nothing once its process is provably gone, or the store says that nobody renewed it
for `LEASE_S` seconds: by the store's clock alone, whatever those of the surgeons say. Who removes
such a lock first creates an object that is named after its token, which one process can.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from ckptsurgeon.hints import again, command
from ckptsurgeon.remote.writes import Changed
from ckptsurgeon.transaction.bucket.place import Place
from ckptsurgeon.transaction.home import HOME
from ckptsurgeon.transaction.lock import LEASE_S, LOCK, Holder, decoded, myself, refusal, stale

RENEW_S = 60
"""Seconds between two renewals."""
LEFT_S = 600
"""Seconds that a lease must still have where the commit is asked for: longer than all attempts of
one request take."""
NAME = f"{HOME}/{LOCK}"


class Lease:
    """A lock that is held; `confirm` says whether it still is."""

    def __init__(self, place: Place, mine: Holder) -> None:
        self._place, self._mine = place, mine
        self._data = json.dumps(asdict(mine)).encode()
        self._renewed = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def confirm(self) -> None:
        """Raise SurgeryError unless the lock is ours, for longer than a request takes."""
        begun = time.monotonic()
        if _holder(self._place)[0] == self._mine and begun - self._renewed < LEASE_S - LEFT_S:
            return
        raise SurgeryError(
            "the lock of this surgery was not renewed in time, or another has it", next=again()
        )

    def take(self) -> None:
        """Hold it from now on. Raises SurgeryError while another does."""
        writes, key = self._place.writes, self._place.key(NAME)
        for _ in range(2):
            try:
                writes.put(key, self._data)
            except Changed:
                record, age = _holder(self._place)
                if record is None:
                    continue
                if record.token != self._mine.token:  # else the answer to our own got lost
                    self._break(record, age)
                    continue
            self._renewed = time.monotonic()
            self._thread.start()
            return
        raise SurgeryError(f"s3://{writes.bucket}/{key}: several surgeries start", next=again())

    def _break(self, record: Holder, age: float) -> None:
        """Remove a lock that is worth nothing. Raises SurgeryError for any other."""
        if not stale(record) and age <= LEASE_S:
            raise refusal(self._place.root / NAME, record)
        writes, claim = self._place.writes, self._place.key(f"{NAME}.{record.token}.heir")
        try:
            writes.put(claim, self._data)
        except Changed:
            found = writes.read(claim)
            heir = decoded(found[0]) if found else None
            if found and heir and heir.token != self._mine.token:
                if not stale(heir) and found[2] <= LEASE_S:
                    raise refusal(self._place.root / NAME, heir) from None
                writes.put(claim, self._data, match=found[1].etag)
        if (_holder(self._place)[0] or self._mine).token == record.token:
            writes.delete(self._place.key(NAME))
        writes.delete(claim)

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            with suppress(SurgeryError):  # the commit asks whether it worked
                begun = time.monotonic()
                found = self._place.writes.read(self._place.key(NAME))
                if found is None or decoded(found[0]).token != self._mine.token:
                    return
                self._place.writes.put(self._place.key(NAME), self._data, match=found[1].etag)
                self._renewed = begun

    def release(self) -> None:
        """Hold it no longer, if it is ours."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        record, _ = _holder(self._place)
        if record is not None and record.token == self._mine.token:
            self._place.writes.delete(self._place.key(NAME))


def _holder(place: Place) -> tuple[Holder | None, float]:
    """Who holds the lock, and the seconds since it was renewed."""
    found = place.writes.read(place.key(NAME))
    if found is None:
        return None, 0
    try:
        return decoded(found[0]), found[2]
    except (ValueError, TypeError, AttributeError):
        unknown = Holder("0" * 16, "an unknown host", "", 0, 0, 0, 0, "unreadable lock record", "?")
        return unknown, found[2]


@contextmanager
def hold(place: Place, title: str) -> Iterator[Lease]:
    """Hold the lock of the run, which is left without a trace. Raises SurgeryError when another
    surgery holds it, and InterruptedSurgery when it can't be removed."""
    lease = Lease(place, myself(title))
    try:
        lease.take()
        yield lease
    finally:
        try:
            lease.release()
        except (SurgeryError, KeyboardInterrupt) as error:
            raise InterruptedSurgery(
                f"the lock could not be removed: {error}",
                untouched="no edit of this surgery was lost",
                next=command("recover", why="remove it"),
            ) from error
