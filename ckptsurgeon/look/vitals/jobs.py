"""Which bytes are read together: strips of a checkpoint, and every float that is in none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dtypes import FLOATS, ITEM_BYTES
from ckptsurgeon.files.pickles.tree import Tensor, tensors
from ckptsurgeon.formats import MOMENTS, Checkpoint, Strip
from ckptsurgeon.formats.fields.constants import ODD
from ckptsurgeon.formats.fields.values import UNSET
from ckptsurgeon.formats.tensors.strips import contiguous, dense, strips
from ckptsurgeon.look.vitals.bound import Edited, limit
from ckptsurgeon.plans.frozen import frozen


@frozen
class Range:
    """Elements of one record: they begin at byte `start` of the archive, as its `first`-th."""

    archive: Archive
    record: str
    start: int
    first: int
    dtype: str
    kind: str


@frozen
class Coded:
    """Elements of one byte: where they are, where the scales of their blocks and the numbers of
    their code book are, how many of both there are, and how many elements are in a block."""

    codes: Range
    scales: Range
    book: Range
    blocks: int
    entries: int
    block: int


@frozen
class Job:
    """`numel` elements that are read side by side, and what is known of them."""

    parameter: str
    numel: int
    ranges: tuple[Range, ...]
    strip: Strip | None = None
    coded: Mapping[str, Coded] = field(default_factory=dict)
    limit: float | None = None

    @property
    def file(self) -> Path:
        """The file that the elements are counted to."""
        return self.first.archive.path

    @property
    def first(self) -> Range:
        """The range that the job is ordered by."""
        return self.ranges[0] if self.ranges else next(iter(self.coded.values())).codes


@frozen
class Source:
    """An archive to be read; `kind` is that of its one tensor if it is a blob of a moment."""

    archive: Archive
    kind: str | None = ""


def jobs(
    checkpoint: Checkpoint | None, sources: Sequence[Source], edits: Sequence[Edited] = ()
) -> list[Job]:
    """Every float in `sources` once, but for what lies in no storage of floats. Strips whose parts
    are not all in `sources` are read by tensor."""
    planner = Planner(sources)
    if checkpoint is not None:
        for strip in strips_of(checkpoint):
            planner.strip(checkpoint, strip, edits)
    for source in sources:
        planner.rest(source)
    return planner.jobs


def strips_of(checkpoint: Checkpoint) -> list[Strip]:
    """Its strips; none where its trees are not what its format says."""
    try:
        return list(strips(checkpoint))
    except (SurgeryError, *ODD):
        return []


class Planner:
    """Finds the ranges of strips, and gives each float to one job."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.jobs: list[Job] = []
        self._archives = {_key(source.archive): source.archive for source in sources}
        self._taken: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        self._payloads: dict[tuple[Any, ...], int] = {}

    def strip(self, checkpoint: Checkpoint, strip: Strip, edits: Sequence[Edited]) -> None:
        """Add a job of what of a strip is there and not taken."""
        found = (self.range(checkpoint, strip, kind) for kind in strip.tensors)
        ranges = [item for item in found if item is not None]
        coded = self._coded(checkpoint, strip)
        if not ranges and not coded:
            return
        for item in ranges:
            self._take(item, strip.numel)
        made_with = strip.adam
        self.jobs.append(
            Job(
                strip.parameter,
                strip.numel,
                tuple(ranges),
                strip,
                coded,
                None if made_with is None else limit(made_with, edits),
            )
        )

    def _coded(self, checkpoint: Checkpoint, strip: Strip) -> dict[str, Coded]:
        """Moments of 8 bits whose codes, scales and book are all there."""
        out = {}
        for kind, found in strip.codes.items():
            parts = []
            for place in found:
                archive = self._archives.get(_key(checkpoint.holder(place)))
                if archive is not None and contiguous(place.value):
                    parts.append(self._at(archive, place.value, place.value.offset, kind))
            scales, book = found.scale.value, found.book.value
            numbers = scales.dtype == book.dtype == "float32"
            if len(parts) == 3 and numbers and found.place.value.numel == strip.numel:
                out[kind] = Coded(
                    parts[0], parts[1], parts[2], scales.numel, book.numel, found.block
                )
        return out

    def range(self, checkpoint: Checkpoint, strip: Strip, kind: str) -> Range | None:
        """Where the elements of one kind are; None where they can't be read as floats."""
        place, first = strip.tensors[kind]
        tensor, numel = place.value, strip.numel
        if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
            return None
        begin = tensor.offset + first
        archive = self._archives.get(_key(checkpoint.holder(place)))
        if archive is None:
            return None
        if begin + numel > tensor.storage_numel or self._overlaps(archive, tensor, begin, numel):
            return None
        return self._at(archive, tensor, begin, kind)

    def _at(self, archive: Archive, tensor: Tensor, begin: int, kind: str) -> Range:
        key = (*_key(archive), tensor.storage)
        if key not in self._payloads:
            archive.storage(tensor)
            archive.byte_order()  # read once, before threads ask for it
            self._payloads[key] = archive.payload(f"data/{tensor.storage}")
        start = self._payloads[key] + begin * ITEM_BYTES[tensor.dtype]
        return Range(archive, f"data/{tensor.storage}", start, begin, tensor.dtype, kind)

    def _taken_of(self, archive: Archive, storage: str) -> list[tuple[int, int]]:
        return self._taken.setdefault((*_key(archive), storage), [])

    def _overlaps(self, archive: Archive, tensor: Tensor, begin: int, numel: int) -> bool:
        taken = self._taken_of(archive, tensor.storage)
        return any(start < begin + numel and begin < end for start, end in taken[-1:])

    def _take(self, item: Range, numel: int) -> None:
        taken = self._taken_of(item.archive, item.record.removeprefix("data/"))
        taken.append((item.first, item.first + numel))

    def rest(self, source: Source) -> None:
        """What no strip has read: by tensor, then what no tensor shows. A number that is kept as a
        tensor (a step, a best score, which may be Inf) is passed over, as is what nobody set."""
        if source.kind is None:
            return
        storages: dict[tuple[str, str], list[tuple[str, str, Tensor]]] = {}
        for path, tensor in tensors(source.archive.tree()):
            number = not tensor.size and tensor.storage_numel == 1
            unset = bool(path) and str(path[-1]).endswith(UNSET)
            if tensor.dtype in FLOATS and not (number or unset):
                kind = str(path[-1]) if path and path[-1] in MOMENTS else ""
                kind = kind if path else source.kind
                named = (_name(path, source.archive), kind, tensor)
                storages.setdefault((tensor.storage, tensor.dtype), []).append(named)
        for members in storages.values():
            kinds = {kind for _, kind, _ in members}
            shared = "" if len(kinds) > 1 else kinds.pop()
            for name, kind, tensor in sorted(members, key=lambda item: item[2].offset):
                if not dense(tensor):  # one number for all elements, or a view of others
                    continue
                end = tensor.offset + tensor.numel
                self._gaps(source.archive, tensor, name, shared and kind, tensor.offset, end)
            self._gaps(source.archive, members[0][2], "", shared, 0, members[0][2].storage_numel)

    def _gaps(
        self, archive: Archive, tensor: Tensor, name: str, kind: str, begin: int, end: int
    ) -> None:
        """Jobs for what of [begin, end) is not read yet."""
        taken = self._taken_of(archive, tensor.storage)
        taken.sort()
        at = begin
        found = []
        for start, stop in taken:
            if start > at:
                found.append((at, min(start, end)))
            at = max(at, stop)
            if at >= end:
                break
        if at < end:
            found.append((at, end))
        for start, stop in found:
            if start < stop:
                made = self._at(archive, tensor, start, kind)
                whole = stop - start == tensor.numel and start == tensor.offset
                strip = Strip(name, stop - start, {}, shape=tensor.size if whole else None)
                self.jobs.append(Job(name, stop - start, (made,), strip if name else None))
                self._take(made, stop - start)


def _key(archive: Archive) -> tuple[Path, int]:
    return archive.path, archive.start


def _name(path: tuple[Any, ...], archive: Archive) -> str:
    words = [str(key) for key in path if isinstance(key, (str, int))]
    return ".".join(words[-2:]) if words else archive.path.stem


def by_file(found: Iterable[Job]) -> Iterator[tuple[Path, list[Job]]]:
    """The jobs of each file, in the order in which their bytes lie in it."""
    files: dict[Path, list[Job]] = {}
    for job in found:
        if job.ranges or job.coded:
            files.setdefault(job.file, []).append(job)
    for file, mine in files.items():
        mine.sort(key=lambda job: job.first.archive.start + job.first.start)
        yield file, mine
