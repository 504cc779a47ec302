"""How a new object is put together: what the store copies by itself, and what is sent.

S3 takes no part of less than 5 MiB but the last one, and none of more than 5 GiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ckptsurgeon.plans.edits import Hole
from ckptsurgeon.plans.frozen import frozen

LEAST = 5 << 20
"""Bytes of every part but the last, at least."""
MOST = 256 << 20
"""Bytes of a part that the store copies, at most, as long as there are not too many of them."""
SENT = 16 << 20
"""Bytes of a part that is sent, at most; a part that begins before holds up to `LEAST` more."""
PARTS = 9_000
"""Parts of an object, at most; a store takes 10,000."""


@frozen
class Range:
    """Bytes [start, end) of an object that is there, with this ETag."""

    key: str
    etag: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


Segment = Range | bytes | Hole


@frozen
class Part:
    """One part: a single `Range` of at least `LEAST` bytes is copied by the store; of all others
    the bytes are sent."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(map(size, self.segments))

    @property
    def copied(self) -> Range | None:
        """What the store copies."""
        first = self.segments[0]
        alone = len(self.segments) == 1 and isinstance(first, Range) and first.size >= LEAST
        return first if alone and isinstance(first, Range) else None


def size(segment: Segment) -> int:
    """Bytes of one segment."""
    return len(segment) if isinstance(segment, bytes) else segment.size


def parts(segments: Iterable[Segment]) -> list[Part]:
    """The segments, one after the other, as parts that a store takes."""
    segments = [segment for segment in segments if size(segment)]
    most = max(MOST, -(-sum(map(size, segments)) // PARTS))
    out: list[Part] = []
    sent: list[Segment] = []

    def room() -> int:
        return sum(map(size, sent))

    def send() -> None:
        if sent:
            out.append(Part(tuple(sent)))
            sent.clear()

    for segment in segments:
        if isinstance(segment, Range) and segment.size >= LEAST:
            lacking = LEAST - room() if sent else 0
            if lacking > 0:
                if segment.size - lacking < LEAST:
                    sent.append(segment)
                    continue
                head, segment = _split(segment, lacking)
                sent.append(head)
            send()
            assert isinstance(segment, Range)
            out += [Part((piece,)) for piece in _evenly(segment, most)]
            continue
        while size(segment):
            head, segment = _split(segment, min(SENT - room(), size(segment)))
            sent.append(head)
            if room() >= SENT:
                send()
    send()
    return out


def _split(segment: Segment, at: int) -> tuple[Segment, Segment]:
    if isinstance(segment, bytes):
        return segment[:at], segment[at:]
    if isinstance(segment, Hole):
        return Hole(at), Hole(segment.size - at)
    middle = segment.start + at
    return (
        Range(segment.key, segment.etag, segment.start, middle),
        Range(segment.key, segment.etag, middle, segment.end),
    )


def _evenly(segment: Range, most: int) -> Iterator[Range]:
    """The range in as few pieces as there can be, none of them short."""
    count = -(-segment.size // most)
    cuts = [segment.start + segment.size * number // count for number in range(count + 1)]
    for start, end in pairwise(cuts):
        yield Range(segment.key, segment.etag, start, end)
