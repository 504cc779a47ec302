"""Whether a saved step is sound: names, containers, meaning, the CRC of every byte, the values.

Each level contains those before it. Reads only, CHUNK bytes at a time, `jobs` files at once.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptsurgeon import disk
from ckptsurgeon.errors import DamagedFile, SurgeryError, count
from ckptsurgeon.files import integrity
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.safetensors import SafetensorsFile
from ckptsurgeon.files.archives.zip_directory import DESCRIPTOR
from ckptsurgeon.files.pickles.tree import tensors
from ckptsurgeon.formats import Blob, Checkpoint, Format
from ckptsurgeon.formats.capabilities import blobs, digests
from ckptsurgeon.formats.fields.constants import ODD, SAFE, TORCH
from ckptsurgeon.formats.layout import KeepsOpaque
from ckptsurgeon.plans.plan import Receipt
from ckptsurgeon.progress import Progress
from ckptsurgeon.transaction import crc32
from ckptsurgeon.workers import Workers, at_work

if TYPE_CHECKING:
    from ckptsurgeon.look.vitals.facts import Values
    from ckptsurgeon.look.vitals.jobs import Source

NAMES, CONTAINER, MEANING, CRC, VALUES = range(5)
CHUNK = 1 << 19
"""Bytes that are read at once: what `jobs` threads hold in memory is a small multiple of them."""
FEW = 4
"""Files whose descriptions are read by one thread: more of them cost more than they save."""
BATCH = 4096
"""Archives that are read before what is wrong with them is told."""


@dataclass
class Soundness:
    """What was found. `checkpoint` has the shards that can be read, or is None; `no_crc` counts
    the bytes in records without a CRC (from level 1), `values` are of level 4."""

    findings: list[str]
    files: int = 0
    checkpoint: Checkpoint | None = None
    no_crc: int | None = None
    values: Values | None = None


@dataclass
class Shard:
    """One file, or one archive inside a file: what is wrong with it."""

    path: Path
    blob: Blob | None = None
    archive: Archive | None = None
    findings: list[str] = field(default_factory=list)
    no_crc: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without its archive: another process reads that itself."""
        return {**self.__dict__, "archive": None}

    @property
    def where(self) -> str:
        """What a finding names."""
        return self.archive.where if self.archive is not None else str(self.path)

    def open(self) -> Archive:
        """Its archive, read once."""
        if self.archive is None:
            kind = SafetensorsFile if self.path.suffix == SAFE else Archive
            inside = self.blob[1:3] if self.blob is not None else ()
            self.archive = kind.open(self.path, *inside)
        return self.archive

    def source(self) -> Source:
        """What the values are read from."""
        from ckptsurgeon.look.vitals.jobs import Source

        return Source(self.open(), "" if self.blob is None else self.blob.kind)


def check(
    format: Format,
    run: Path,
    step: int,
    level: int,
    *,
    receipts: Sequence[Receipt] = (),
    jobs: Workers = 8,
    progress: Progress | None = None,
) -> Soundness:
    """All findings about the saved `step` of `run`, up to `level`. Damaged shards are left out of
    what compares shards; `receipts` are the standing surgeries. Raises OSError for a file that
    can't be read."""
    folder = format.directory(run, step)
    files = format.files(run, step)
    out = Soundness([], len(files))
    out.findings += _guarded(folder, lambda: _names(format, run, step))
    out.checkpoint = _opened(format, run, step)
    read = out.checkpoint.archives if out.checkpoint is not None else {}
    there = [path for path in files if disk.exists(path)]  # the names say what is gone
    if isinstance(format, KeepsOpaque):
        there = [path for path in there if not format.opaque(path)]
    shards = [Shard(path) for path in there if path.name.endswith((*TORCH, SAFE)) or path in read]
    for shard in shards:
        shard.archive = read.get(shard.path)
    sources: list[Source] = []
    if level >= CONTAINER:
        out.no_crc = 0
        for shard in _inspected(shards, out.checkpoint, level, jobs, progress):
            out.findings += shard.findings
            out.no_crc += shard.no_crc
            if level >= VALUES and not shard.findings:
                sources.append(shard.source())
    if out.checkpoint is None:
        damaged = {shard.path for shard in shards if shard.findings}
        if damaged:
            out.checkpoint = _opened(format, run, step, damaged)
        else:
            out.findings += [
                t
                for t in _guarded(folder, lambda: _open_error(format, run, step))
                if t not in out.findings
            ]
    if level >= MEANING and out.checkpoint is not None:
        out.findings += _guarded(folder, out.checkpoint.contradictions)
        with contextlib.suppress(SurgeryError, *ODD):  # which is among the findings
            out.checkpoint.state()
        out.findings += out.checkpoint.impossible
    if level >= CRC and out.checkpoint is not None:
        saved = [_Saved(*item) for item in digests(out.checkpoint).items()]
        with at_work(jobs, len(saved)) as mapped:
            out.findings += [text for found in mapped(_sha, saved) for text in found]
    out.findings = list(dict.fromkeys(out.findings))  # two readers may meet the same damage
    if level >= VALUES:
        from ckptsurgeon.look.vitals import facts

        out.values = facts.read(out.checkpoint, sources, receipts, workers=jobs, progress=progress)
        out.findings += facts.findings(out.values)
    return out


def _names(format: Format, run: Path, step: int) -> list[str]:
    missing = format.missing(run, step)
    findings = format.strays(run, step)
    if missing:
        name = format.directory(run, step).name
        findings.insert(0, f"{name}: missing: {', '.join(missing)}")
    return findings


def _guarded(folder: Path, look: Callable[[], list[str]]) -> list[str]:
    try:
        return look()
    except SurgeryError as error:
        return [error.what]
    except ODD as error:
        return [f"{folder.name}: not a checkpoint of this format: {type(error).__name__}: {error}"]


def _opened(
    format: Format, run: Path, step: int, without: Iterable[Path] = ()
) -> Checkpoint | None:
    try:
        return format.open(run, step, set(without))
    except (SurgeryError, *ODD):
        return None


def _open_error(format: Format, run: Path, step: int) -> list[str]:
    format.open(run, step)
    return []


def _inspected(
    shards: Sequence[Shard],
    checkpoint: Checkpoint | None,
    level: int,
    jobs: Workers,
    progress: Progress | None,
) -> Iterator[Shard]:
    """The shards, and then the archives inside larger files that are there, with what is wrong with
    each. There may be millions of those: no more than BATCH are in memory unless the caller keeps
    them."""
    there = cache(disk.exists)

    def inside() -> Iterator[Blob]:
        found = blobs(checkpoint) if checkpoint is not None else ()
        return (blob for blob in found if there(blob.file))

    total = len(shards) + sum(1 for _ in inside()) if progress is not None else 0
    waiting = chain(shards, (Shard(blob.file, blob) for blob in inside()))
    done = 0
    if progress is not None:
        progress("verify", done, total)
    few = level < CRC and len([*islice(chain(shards, inside()), FEW + 1)]) <= FEW
    with at_work(1 if few and isinstance(jobs, int) else jobs, BATCH) as mapped:
        while batch := list(islice(waiting, BATCH)):
            for shard, seen in zip(batch, mapped(partial(_seen, level), batch), strict=True):
                shard.findings, shard.no_crc = seen.findings, seen.no_crc
                done += 1
                if progress is not None:
                    progress("verify", done, total)
            yield from batch


@dataclass
class _Seen:
    """What is wrong with a shard, and how many of its bytes have no CRC."""

    findings: list[str]
    no_crc: int


def _seen(level: int, shard: Shard) -> _Seen:
    inspect(shard, level)
    return _Seen(shard.findings, shard.no_crc)


# --- one file ------------------------------------------------------------------------------------


def inspect(shard: Shard, level: int) -> None:
    """Fill in what is wrong with one file. What a level needs is checked by those before it, so
    the first one with a finding is the last."""
    try:
        archive = shard.open()
        with archive.reading():
            _container(shard, archive)
            if level >= MEANING:
                for _, tensor in tensors(archive.tree()):
                    archive.storage(tensor)
            if level >= CRC and archive.directory is not None:
                _crcs(shard, archive)
    except SurgeryError as error:
        shard.findings.append(error.what)
    except ODD as error:
        shard.findings.append(
            f"{shard.where}: not a file that a trainer saved: {type(error).__name__}"
        )


def _container(shard: Shard, archive: Archive) -> None:
    """Local headers as their entries say, and no payload that reaches into the next record."""
    records = sorted(archive.records.values(), key=lambda record: record.offset)
    shard.no_crc = sum(record.size for record in records if not record.crc)
    if archive.directory is None:
        return
    archive.expect(record.name for record in records)
    end = 0
    for record in records:
        if record.offset < end:
            raise DamagedFile(
                shard.where, record.offset, f"the record {record.name!r} overlaps another"
            )
        end = archive.payload(record.name) + record.size


def _pieces(archive: Archive, start: int, end: int, item: int) -> Iterator[tuple[int, int, bool]]:
    """The bytes [start, end) as (start, end, whether they are a hole), none longer than CHUNK but
    for holes, and none that cuts an element of `item` bytes."""
    at = start
    while at < end:
        data = archive.next_data(at, end)
        data -= (data - start) % item
        if data > at:
            yield at, data, True
        hole = archive.next_hole(data, end) if data < end else end
        hole = min(end, hole + -(hole - start) % item)
        for begin in range(data, hole, CHUNK):
            yield begin, min(begin + CHUNK, hole), False
        at = hole


def _crcs(shard: Shard, archive: Archive) -> None:
    """The CRC of each record, and the copy of it behind the payload that a stream reader uses."""
    checksum = _checksum()
    for record in archive.records.values():
        if not record.crc:
            continue
        start = archive.payload(record.name)
        end = start + record.size
        crc = 0
        for begin, finish, hole in _pieces(archive, start, end, 1):
            if hole:
                length = finish - begin
                crc = crc32.joined(crc, crc32.of_zeros(length), length)
            else:
                crc = checksum(archive.read_at(begin, finish - begin), crc)
        if crc != record.crc:
            shard.findings.append(
                f"{shard.where}: byte {start}: the record {record.name!r} of "
                f"{count(record.size, 'byte')} has CRC {crc:08x}, not {record.crc:08x}"
            )
        if record.flags & DESCRIPTOR and not archive.descriptor(record.name):
            shard.findings.append(
                f"{shard.where}: byte {end}: the data descriptor of {record.name!r} differs"
            )


class _Saved(NamedTuple):
    """A file, and the sha256 that the trainer saved for it."""

    path: Path
    sha256: str


def _sha(saved: _Saved) -> list[str]:
    path, expected = saved
    try:
        actual = integrity.sha256(path)
    except FileNotFoundError:
        return [f"{path}: missing, and the checkpoint's integrity manifest names it"]
    if actual == expected:
        return []
    return [f"{path}: its sha256 is {actual[:16]}…, the integrity manifest has {expected[:16]}…"]


def _checksum() -> Callable[[bytes, int], int]:
    """CRC-32: the fastest library that is installed, or the standard one (2 to 3 GB/s)."""
    for name in ("zlib_ng.zlib_ng", "isal.isal_zlib"):
        try:
            fast: Callable[[bytes, int], int] = importlib.import_module(name).crc32
        except ImportError:
            continue
        return fast
    return zlib.crc32
