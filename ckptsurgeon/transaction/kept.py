"""What the files were that a surgery took away, so that an undo knows whether somebody changed them
since. Reads only.

A file of up to `SMALL` bytes that was replaced, or moved by itself, is known by its sha256. Of all
others, which may be terabytes, the size and the time of the last write are kept: nobody writes to
a file without changing its time, but who sets the time back is not noticed, nor is a broken disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon import disk, whole_file
from ckptsurgeon.plans.edits import Content, Edit, Inverse, Move, Replace, Tail, Truncate
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.remote import reads
from ckptsurgeon.transaction.digests import tail_digest
from ckptsurgeon.transaction.home import HOME, RECEIPTS, in_attic
from ckptsurgeon.transaction.inverse import kept_tails
from ckptsurgeon.workers import side_by_side

SMALL = 1 << 20
GRAINS = (1, 100, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000)
"""Nanoseconds: in which units file systems and archives keep the time of a file."""
SAME, UNKNOWN, CHANGED = "same", "not compared", "changed"

Known = tuple[int, int, str]
"""Size, time of the last write, and sha256 or the empty text."""
EMPTY: Known = (0, 0, hashlib.sha256().hexdigest())


def record_file(id: str) -> str:
    """Where it is written what surgery `id` took away."""
    return f"{HOME}/{RECEIPTS}/{id}/kept.json"


def document(root: Path, edits: Iterable[Edit]) -> bytes:
    """What the record says: name in the attic → size, time, sha256 of what comes to lie there; and
    of each file that is new or takes the place of another, which is staged by now, the same."""
    paths: dict[str, tuple[Path, bool] | None] = {}
    staged: dict[str, Replace] = {}
    for edit in edits:
        if isinstance(edit, Replace):
            before = staged.get(edit.file)  # what the file is by then, if it is replaced twice
            if before is None:
                paths[edit.kept] = root / edit.file, True
            elif before.content is None:
                paths[edit.kept] = root / before.staged, True
            elif before.content == Content(()):
                paths[edit.kept] = None
            staged[edit.file] = edit
            paths[edit.file] = root / edit.staged, True
        elif isinstance(edit, Move) and edit.content is not None and not in_attic(edit.dst):
            paths[edit.dst] = root / edit.src, True
        elif isinstance(edit, Move) and edit.content is None and in_attic(edit.dst):
            for path in files(root / edit.src):
                below = os.path.relpath(path, root / edit.src)
                name = edit.dst if below == "." else f"{edit.dst}/{below}"
                paths[name] = path, below == "."
    found = side_by_side(lambda at: EMPTY if at is None else _known(*at), paths.values())
    known = dict(zip(paths, found, strict=True))
    if reads.current() is not None:  # there is no copy that keeps the time of its object
        known = {name: each for name, each in known.items() if each[2]}
    lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in known.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode(errors="backslashreplace")


Found = Mapping[str, "os.stat_result | None"]
"""What stat(2) says of each file that a surgery edited in place; None where it says nothing."""


def found(root: Path, inverse: Iterable[Inverse]) -> Found:
    """The same for those that the `inverse` edits in place. Each is asked once for all questions
    of a plan; what changes from there on is found at the commit."""
    files = [edit.file for edit in inverse if isinstance(edit, (Truncate, Tail))]
    return dict(zip(files, side_by_side(lambda file: _status(root / file), files), strict=True))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


@frozen
class Compared:
    """What an undo finds of the files that it brings back: those that were `changed`, as they came,
    went, or have another size or sha256; and those of the same size that were written since or
    `copied` without their times, of which nothing more is known. `dated` is whether another one
    still has the time that was kept of it; of some an older ckptsurgeon kept nothing (`unknown`).
    """

    changed: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    dated: bool = False
    unknown: bool = False

    @property
    def verdict(self) -> str:
        """SAME, UNKNOWN or CHANGED."""
        return CHANGED if self.changed else UNKNOWN if self.copied or self.unknown else SAME


def compared(root: Path, id: str, inverse: Iterable[Inverse], found: Found) -> Compared:
    """What surgery `id` took away, and the `inverse` brings back, held against what was kept of
    it."""
    known = read(root / record_file(id))
    names = sorted(known)
    unknown = dated = False
    verdicts: dict[str, str] = {}
    for edit in inverse:
        if isinstance(edit, (Truncate, Tail)):
            wanted = edit.new_mtime_ns if isinstance(edit, Truncate) else edit.mtime_ns
            unknown |= wanted is None
            status = found[edit.file]
            if isinstance(edit, Tail) and reads.current() is not None:
                differs = status is None or _is_later(status, root, id)
            else:
                differs = wanted is not None and not (status and at(status.st_mtime_ns, wanted))
            verdicts[edit.file] = (UNKNOWN if status else CHANGED) if differs else SAME
            dated |= wanted is not None and not differs
            continue
        name = edit.staged if isinstance(edit, Replace) else edit.src
        if not in_attic(name) or name == kept_tails(id):
            continue
        first, end = (bisect_left(names, f"{name}{after}") for after in "/0")  # 0 comes after /
        expected = {n: known[n] for n in (name, *names[first:end]) if n in known}
        if not expected:
            unknown = True
            continue
        there = {os.path.relpath(path, root): path for path in files(root / name)}
        verdicts |= dict.fromkeys(sorted(expected.keys() ^ there.keys()), CHANGED)
        both = [n for n in expected if n in there]
        pairs = [(there[n], expected[n]) for n in both]
        verdicts |= zip(both, side_by_side(lambda pair: held(*pair), pairs), strict=True)
        dated |= any(verdicts[name] == SAME and not expected[name][2] for name in both)
    changed, copied = (
        tuple(name for name, found in verdicts.items() if found == each)
        for each in (CHANGED, UNKNOWN)
    )
    return Compared(changed, copied, dated, unknown)


def rewritten(root: Path, id: str, names: Iterable[str]) -> list[str]:
    """The files among `names` that surgery `id` replaced, and that somebody wrote since."""
    known = read(root / record_file(id))
    return [
        name
        for name in names
        if name in known and disk.is_file(root / name) and not same(root / name, known[name])
    ]


def saved_again(root: Path, id: str, edit: Truncate | Tail, status: os.stat_result | None) -> bool:
    """Whether a file that was edited in place is no longer what surgery `id`, which may be an undo,
    left, by its `status`. Its time is that of the edit where nobody wrote to it; of one that an
    undo cut, and that somebody wrote to, nothing else is known."""
    if status is None:  # refused for that
        return False
    if isinstance(edit, Tail):
        wanted, size = edit.mtime_ns, edit.old_size
    else:
        wanted, size = edit.new_mtime_ns, edit.new_size
    same = wanted is not None and at(status.st_mtime_ns, wanted)
    if status.st_size != size or same:
        return status.st_size != size
    if isinstance(edit, Tail):
        in_bucket = reads.current() is not None
        return _is_later(status, root, id) if in_bucket else wanted is not None
    return tail_digest(root / edit.file, edit.spans) != edit.digest


def files(path: Path) -> Iterator[Path]:
    """The file itself, or every file below a folder; a link is a file, to a folder too."""
    if disk.is_link(path) or not disk.is_folder(path):
        if disk.is_there(path):
            yield path
        return
    for here, folders, names in disk.walk(path):
        links = [name for name in folders if disk.is_link(Path(here) / name)]
        yield from (Path(here) / name for name in sorted([*names, *links]))


def _known(path: Path, digest: bool) -> Known:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return status.st_size, 0, hashlib.sha256(os.fsencode(path.readlink())).hexdigest()
    short = digest and stat.S_ISREG(status.st_mode) and status.st_size <= SMALL
    return status.st_size, status.st_mtime_ns, _sha256(path) if short else ""


def same(path: Path, expected: Known) -> bool:
    """Whether the file is as the record has it."""
    return held(path, expected) == SAME


def held(path: Path, expected: Known) -> str:
    """Whether the file is as the record has it: SAME, CHANGED, or UNKNOWN where its time alone is
    another."""
    size, mtime_ns, digest = expected
    now = _known(path, bool(digest))
    if now[0] != size or (digest and now[2] != digest):
        return CHANGED
    return SAME if digest or at(now[1], mtime_ns) else UNKNOWN


def at(found: int, wanted: int) -> bool:
    """Whether it is the time that was set, as far as the file system can tell."""
    return any(found == wanted // grain * grain for grain in GRAINS)


def _is_later(status: os.stat_result, root: Path, id: str) -> bool:
    """Whether an object was written after surgery `id`, whose record is the last that it writes:
    by the store's clock, which may count seconds, so that one more write in the same is missed."""
    record = _status(root / record_file(id))
    return record is None or status.st_mtime_ns > record.st_mtime_ns


def _sha256(path: Path) -> str:
    return hashlib.sha256(whole_file.read(path, SMALL, follow=False)).hexdigest()


def read(path: Path) -> dict[str, Known]:
    """The record, by name; empty where there is none, or something else. Raises OSError where it
    can't be read: then nothing says that nobody wrote to these files."""
    try:
        found: Any = json.loads(whole_file.read(path, whole_file.MAX_RECORD, follow=False))
        return {str(n): (int(size), int(at), str(sha)) for n, (size, at, sha) in found.items()}
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, *whole_file.UNLIKE):
            raise
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    return {}
