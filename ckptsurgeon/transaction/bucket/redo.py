"""Carries out the edits of a committed surgery in a bucket, from whatever point was reached.

Each kind of edit sees from the store alone what is done already. An object is there as it was or as
it will be, never a part of it; over several objects nothing is atomic, so a reader that comes
meanwhile may see old ones and new ones. A store has no rename: what moves is copied by the store,
and its old name is removed after that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from ckptsurgeon.errors import InterruptedSurgery, count
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Append, Hole, Move, Replace, Tail, Truncate
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.remote import parts
from ckptsurgeon.remote.parts import Range, Segment
from ckptsurgeon.remote.writes import Changed, Head, Upload
from ckptsurgeon.transaction.bucket.place import Place, at_once
from ckptsurgeon.transaction.digests import anchored
from ckptsurgeon.transaction.entry import Step
from ckptsurgeon.transaction.redo import groups

SENT = 8 << 20
"""An object of at most so many bytes is sent anew rather than copied by the store: a request to
send it has a condition everywhere."""


@frozen
class Ready:
    """The parts of a new object, which lack nothing but to be joined, in place of the one with the
    ETag `over`."""

    upload: Upload
    over: str


def redo(
    place: Place,
    steps: Sequence[Step],
    tails: str,
    ready: Mapping[str, Ready],
    done: Callable[[int], None],
) -> None:
    """Do, or finish, all steps; `ready` are the parts of objects that were sent before the commit,
    by the file. Raises InterruptedSurgery when an object is neither before nor after its step."""

    def do(step: Step) -> None:
        if isinstance(step, Tail):
            _append(place, step, tails, ready.get(step.file))
        elif isinstance(step, Truncate):
            _truncate(place, step, ready.get(step.file))
        elif isinstance(step, Replace):
            _replace(place, step)
        else:
            _move(place, step)

    for group in groups(steps):
        if isinstance(group[0], Move):
            for step in group:
                do(step)
        else:
            at_once(do, group)
        done(len(group))


def unlike(place: Place, name: str, what: str) -> InterruptedSurgery:
    """What is said of an object that somebody else changed."""
    return InterruptedSurgery(
        f"s3://{place.writes.bucket}/{place.key(name)}: {what}",
        untouched="the journal is kept, and so is every byte from before the surgery",
        next=("put the object back as the surgery left it", command("recover", why="after that")),
    )


# --- append and truncate -------------------------------------------------------------------------


def appended(place: Place, head: Head, edit: Append) -> list[Segment]:
    """The object as it will be: what is there, and what comes after it."""
    return [Range(place.key(edit.file), head.etag, 0, edit.old_size), *_tail(edit, edit.data)]


def cut(place: Place, head: Head, step: Truncate) -> list[Segment]:
    """The object as it was: the first bytes of what is there."""
    return [Range(place.key(step.file), head.etag, 0, step.old_size)]


def _tail(edit: Append | Tail, data: bytes) -> list[Segment]:
    out: list[Segment] = []
    end, at = edit.old_size, 0
    for start, stop in edit.spans:
        out += [Hole(start - end), data[at : at + stop - start]]
        end, at = stop, at + stop - start
    return out


def _append(place: Place, step: Tail, tails: str, ready: Ready | None) -> None:
    head = place.head(step.file)
    if head is not None and head.size == step.spans[-1][1] and _is_ours(place, head, step):
        return
    (before,) = anchored(step.old_size)
    if head is None or head.size != step.old_size:
        raise unlike(place, step.file, f"it should have {count(step.old_size, 'byte')}")
    if _digest(place, head, step.file, [before]) != step.anchor:
        raise unlike(place, step.file, "it is another than the one that the surgery began with")
    old = Range(place.key(step.file), head.etag, 0, step.old_size)

    def segments() -> list[Segment]:
        staged = place.head(tails)
        if staged is None:
            raise unlike(place, tails, "the staged bytes are gone")
        span = Range(place.key(tails), staged.etag, step.at, step.at + step.size)
        data = place.writes.bytes_of(span)
        if hashlib.sha256(data).hexdigest() != step.digest:
            raise unlike(place, tails, f"the staged bytes of {step.file} are damaged")
        return [old, *_tail(step, data)]

    try:
        _put(place, step.file, head, segments, ready)
    except Changed:
        head = place.head(step.file)  # it may be our own request whose answer was lost
        if head is None or head.size != step.spans[-1][1] or not _is_ours(place, head, step):
            raise unlike(place, step.file, "somebody wrote it meanwhile") from None


def _truncate(place: Place, step: Truncate, ready: Ready | None) -> None:
    head = place.head(step.file)
    if head is not None and head.size == step.old_size:
        return
    if head is None or head.size != step.new_size or not _is_ours(place, head, step):
        what = f"the bytes after {step.old_size} are not those that the surgery wrote"
        raise unlike(place, step.file, what)
    try:
        _put(place, step.file, head, lambda: cut(place, head, step), ready)
    except Changed:
        found = place.head(step.file)
        if found is None or found.size != step.old_size:
            raise unlike(place, step.file, "somebody wrote it meanwhile") from None


def _put(
    place: Place,
    file: str,
    head: Head,
    segments: Callable[[], list[Segment]],
    ready: Ready | None,
) -> None:
    """The object of these segments in place of the one that `head` is of, with its metadata; by the
    parts that are `ready`, unless they are gone."""
    if ready is not None and ready.over == head.etag:
        try:
            place.writes.complete(ready.upload, head.etag)
            return
        except Changed:
            now = place.head(file)
            if now is None or now.etag != head.etag:
                raise
    made = segments()
    if sum(map(parts.size, made)) <= SENT:
        data = place.writes.content(made)
        place.writes.put(place.key(file), data, like=head, match=head.etag)
    else:
        place.writes.complete(place.writes.upload(place.key(file), made, head), head.etag)


def _is_ours(place: Place, head: Head, step: Tail | Truncate) -> bool:
    return _digest(place, head, step.file, step.spans) == step.digest


def _digest(place: Place, head: Head, file: str, spans: Iterable[tuple[int, int]]) -> str:
    """sha256 of these bytes of the object."""
    digest = hashlib.sha256()
    for start, end in spans:
        digest.update(place.writes.bytes_of(Range(place.key(file), head.etag, start, end)))
    return digest.hexdigest()


# --- replace and move ----------------------------------------------------------------------------


def _replace(place: Place, step: Replace) -> None:
    staged, kept = place.head(step.staged), place.head(step.kept)
    if staged is None:
        if kept is None:
            raise unlike(place, step.staged, "neither the new object nor the one in the attic is")
        return
    now = place.head(step.file)
    if now is None:
        raise unlike(place, step.file, "it is gone")
    if kept is None:
        _copy(place, step.file, now, step.kept)
    source = Range(place.key(step.staged), staged.etag, 0, staged.size)
    if staged.size <= SENT:
        data = place.writes.bytes_of(source)
        try:
            place.writes.put(place.key(step.file), data, like=staged, match=now.etag)
        except Changed:
            found = place.writes.read(place.key(step.file))
            if found is None or found[0] != data:
                raise unlike(place, step.file, "somebody wrote it meanwhile") from None
    else:
        _copy(place, step.staged, staged, step.file)
    place.delete([step.staged])


def _copy(place: Place, source: str, head: Head, target: str) -> None:
    try:
        place.writes.copy(place.key(source), head, place.key(target))
    except Changed:
        raise unlike(place, source, "somebody wrote it meanwhile") from None


def _move(place: Place, step: Move) -> None:
    head = place.head(step.src)
    below = [] if head else place.below(step.src)
    if head is None and not below:
        if place.head(step.dst) is None and not place.below(step.dst):
            raise unlike(place, step.src, f"neither it nor {step.dst} exists")
        return
    source, target = place.key(step.src), place.key(step.dst)
    there = {item.key for item in place.mirror.store.list(target)}
    sources = below or [source]

    def copy(key: str) -> None:
        moved = target + key[len(source) :]
        if moved in there:  # nothing had that name before the surgery
            return
        if (now := place.writes.head(key)) is not None:
            try:
                place.writes.copy(key, now, moved)
            except Changed:
                raise unlike(place, step.src, "somebody wrote it meanwhile") from None

    marks, others = marked(sources)
    for keys in (others, marks):
        at_once(copy, keys)
    for keys in (marks, others):
        at_once(place.writes.delete, keys)


def marked(keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """The objects that say of others that they are all there, which come last and go first; and the
    others."""
    keys = list(keys)
    marks = [key for key in keys if PurePosixPath(key).name.startswith(".")]
    return marks, [key for key in keys if key not in set(marks)]
