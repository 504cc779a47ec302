"""Bytes that are computed while they are staged, by an executor whose workers may be other hosts.

The new bytes are a list of jobs. A job reads sources and writes ranges of staged files, which are
there at their full size. It may be done twice, and by two at once: both write the same bytes. It
ends, once they are durable, with its record: a place of its own in one file beside the staged ones,
which says the CRC-32 of each range. What has no record, as seen from the one process that commits,
was not done.

A worker that was cut off and comes back may still be at a job that another one has done. It writes
only while the record file is that of its own list, which it looks at once its files are open, and
again before a write where the last look is STALE seconds old. So it writes nothing into the files
of another attempt.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import again
from ckptsurgeon.plans.as_json import to_json
from ckptsurgeon.plans.edits import Computed, Content, Piece, Span
from ckptsurgeon.plans.sources import Source
from ckptsurgeon.progress import Progress, counted, silent
from ckptsurgeon.transaction import computing
from ckptsurgeon.transaction.coding import numel, width
from ckptsurgeon.transaction.computing import Group, Place, Sum
from ckptsurgeon.transaction.reading import ALIGN, LONG, ROOM, Reader, Rooms
from ckptsurgeon.workers import host

BATCH = 256 << 20
"""Bytes that a job writes, or more by one stretch."""
STRETCH = 1 << 26
"""Elements of one source that a job computes at most."""
STALE = 5.0
"""Seconds after which a worker looks again whether its list is still the one that is done."""
SLOT = 4096
"""What the place of a record is a multiple of: a page, so no two hosts write to one."""
_ROOMS = Rooms()

T = TypeVar("T")


class Seen(NamedTuple):
    """A source as the surgeon saw it. Inode and device are not compared, since hosts number them
    differently."""

    file: str
    size: int
    mtime_ns: int


class Part(NamedTuple):
    """What is computed of the same numbers; `once` says which of them no other part reads."""

    group: Group
    once: tuple[bool, ...]
    places: tuple[Place, ...]


class Job(NamedTuple):
    """`record` is the file of the records, `at` the place of its own there, `list` the digest of
    the whole list. `known` are the CRCs that a record of an earlier attempt has."""

    root: Path
    record: Path
    list: str
    at: int
    room: int
    parts: tuple[Part, ...]
    sources: tuple[Seen, ...]
    known: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that it writes."""
        return sum(part.size for _, part in ranges(self))


def ranges(job: Job) -> Iterator[tuple[Path, Sum]]:
    """Each range that it writes, of a CRC that is not known."""
    for group, _, places in job.parts:
        for path, at, piece in places:
            yield path, Sum(at, numel(group[0]) * width(piece.dtype), 0)


def copied(content: T) -> T | Content:
    """The same with its long spans as pieces that are computed, where it has pieces: a job copies
    them, and their CRC is known."""
    if not isinstance(content, Content):
        return content
    pieces: list[Piece] = []
    for piece in content.pieces:
        if isinstance(piece, Span) and piece.end - piece.start >= LONG:
            source = Source(piece.file, piece.start, piece.end, "")
            piece = Computed("copy", "", piece.end - piece.start, ((source,),))
        pieces.append(piece)
    return Content(tuple(pieces), content.mtime_ns)


# --- the list ------------------------------------------------------------------------------------


def of(root: Path, record: Path, places: Sequence[Place]) -> list[Job]:
    """The jobs that fill these places, the same ones each time while their sources are the same."""
    groups: dict[Group, list[Place]] = {}
    for place in places:
        for group, part in computing.stretches(place, STRETCH):
            groups.setdefault(group, []).append(part)
    uses = Counter(source for group in groups for source in set(group))
    seen: dict[str, Seen] = {}
    jobs: list[Job] = []
    parts: list[Part] = []
    size, at = 0, SLOT
    for number, (group, filled) in enumerate(groups.items(), 1):
        parts.append(Part(group, tuple(uses[source] == 1 for source in group), tuple(filled)))
        size += sum(numel(group[0]) * width(place.piece.dtype) for place in filled)
        if size >= BATCH or number == len(groups):
            names = dict.fromkeys(n for part in parts for n in computing.names(part.group))
            for name in names:
                if name not in seen:
                    info = (root / name).stat()
                    seen[name] = Seen(name, info.st_size, info.st_mtime_ns)
            terms = max(len(part.group) for part in parts)
            room = min(ROOM, max(4 * ALIGN, computing.ROOMS // 8 // terms))
            jobs.append(
                Job(root, record, "", at, room, tuple(parts), tuple(seen[name] for name in names))
            )
            at += slot(jobs[-1])
            parts, size = [], 0
    digest = hashlib.sha256()
    for job in jobs:
        what = job._replace(root=Path(), record=Path())
        digest.update(json.dumps(what, default=to_json).encode() + b"\n")
    return [job._replace(list=digest.hexdigest()) for job in jobs]


def slot(job: Job) -> int:
    """Bytes of the place of its record."""
    places = sum(len(part.places) for part in job.parts)
    return -(-(768 + 12 * places) // SLOT) * SLOT


def begin(jobs: Sequence[Job]) -> None:
    """Make the record file of a list, without any record."""
    record, last = jobs[0].record, jobs[-1]
    with disk.created(record) as descriptor:
        disk.write_at(descriptor, record, 0, sealed({"list": last.list}))
        disk.truncate(descriptor, record, last.at + slot(last))
        disk.fsync_file(descriptor, record)


def is_of(record: Path, jobs: Sequence[Job]) -> bool:
    """Whether it is the record file of this list: the same jobs, of sources that are as they
    were."""
    return bool(jobs) and header(record) == jobs[0].list


def header(record: Path) -> str:
    """The digest of the list that a record file is of; empty where it is of none, or is gone."""
    try:
        with record.open("rb") as file:
            return str((unsealed(file.read(SLOT)) or {}).get("list", ""))
    except OSError:
        return ""


def known(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, with what their records say."""
    with jobs[0].record.open("rb", buffering=0) as file:
        return [job._replace(known=_crcs(file.fileno(), job)) for job in jobs]


def _crcs(descriptor: int, job: Job) -> tuple[int, ...]:
    document = unsealed(os.pread(descriptor, slot(job), job.at)) or {}
    crcs = document.get("crcs") if document.get("list") == job.list else None
    if not isinstance(crcs, list) or len(crcs) != sum(len(part.places) for part in job.parts):
        return ()
    return tuple(crcs) if all(isinstance(crc, int) for crc in crcs) else ()


def sealed(document: Mapping[str, object]) -> bytes:
    """One line, which says by a digest that it is whole."""
    body = json.dumps(document).encode()
    return hashlib.sha256(body).hexdigest().encode() + b" " + body + b"\n"


def unsealed(data: bytes) -> dict[str, object] | None:
    """What was sealed; None for anything else, as a record that was cut off."""
    line, end, _ = data.partition(b"\n")
    digest, _, body = line.partition(b" ")
    if not end or hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    document = json.loads(body)
    return document if isinstance(document, dict) else None


# --- on a worker ---------------------------------------------------------------------------------


def do(job: Job) -> str:
    """Do one job, unless what its record says reads back; the host that did it.

    Raises SurgeryError where another list has taken its place, or a source has changed."""
    if not (job.known and check(job)):
        crcs = [
            crc
            for part in job.parts
            for _, crc in computing.compute(
                job.root, part.group, part.places, part.once, _ROOMS, job.room, _watch(job)
            )
        ]
        for path in dict.fromkeys(path for path, _ in ranges(job)):
            with disk.opened(path) as descriptor:
                disk.fsync_data(descriptor, path)
        _watch(job)()
        document = {"list": job.list, "host": host()[:64], "crcs": crcs}
        with disk.opened(job.record) as descriptor:
            disk.write_at(descriptor, job.record, job.at, sealed(document))
            disk.fsync_data(descriptor, job.record)
    return host()


def check(job: Job) -> bool:
    """Whether each range that it wrote reads back with the CRC of its record."""
    for (path, part), crc in zip(ranges(job), job.known, strict=True):
        found, end = 0, part.offset + part.size
        (room,) = _ROOMS.get(1, min(ROOM, part.size + ALIGN))
        with Reader(path, part.offset, end, room) as staged:
            for data in staged.all():
                found = zlib.crc32(data, found)
        if found != crc:
            return False
    return True


def _watch(job: Job) -> Callable[[], None]:
    """To be called before each write, once all files are open."""
    looked = 0.0

    def still() -> None:
        nonlocal looked
        now = time.clock_gettime(time.CLOCK_BOOTTIME)  # counts what a host sleeps, too
        if looked and now - looked < STALE:
            return
        if header(job.record) != job.list:
            raise SurgeryError(
                f"{job.record} is no longer that of this job: another attempt has begun, or the "
                f"worker on {host()} sees another disk",
                next=again(),
            )
        for seen in job.sources:
            info = (job.root / seen.file).stat()
            if (info.st_size, info.st_mtime_ns) != (seen.size, seen.mtime_ns):
                raise SurgeryError(
                    f"{job.root / seen.file} is not on {host()} what it was when the work was "
                    "given out",
                    next=again(),
                )
        looked = now

    return still


# --- all of them ---------------------------------------------------------------------------------


def done(jobs: Sequence[Job], workers: Executor, progress: Progress = silent) -> list[Job]:
    """Have the workers do all jobs; the same with what their records say. `progress` counts
    bytes."""
    if not jobs:
        return []
    sizes = [job.size for job in jobs]
    hosts = list(counted(workers.map(do, known(jobs)), "computing", sizes, progress))
    finished = known(jobs)
    for job, by in zip(finished, hosts, strict=True):
        if not job.known:
            raise SurgeryError(
                f"{by} has done a job, and its record is not in {job.record}: it sees another disk",
                next=again(),
            )
    return finished


def refuse_unlike(jobs: Sequence[Job], workers: Executor, progress: Progress = silent) -> None:
    """Have the workers read all of it back. Raises SurgeryError where that is not what was
    written."""
    sizes = [job.size for job in jobs]
    found = counted(workers.map(check, jobs), "checking", sizes, progress)
    for job, whole in zip(jobs, found, strict=True):
        if not whole:
            path, part = next(ranges(job))
            raise unlike(path, part.offset)


def unlike(path: Path, at: int) -> SurgeryError:
    """The refusal of what does not read back."""
    return SurgeryError(
        f"{path}: byte {at}: what was written does not read back",
        next="check the disk and its kernel log before anything else",
    )


def sums(jobs: Sequence[Job]) -> Mapping[Path, Sequence[Sum]]:
    """The sums of each file, ascending."""
    found: dict[Path, list[Sum]] = {}
    for job in jobs:
        for (path, part), crc in zip(ranges(job), job.known, strict=True):
            found.setdefault(path, []).append(part._replace(crc=crc))
    return {path: sorted(parts) for path, parts in found.items()}
