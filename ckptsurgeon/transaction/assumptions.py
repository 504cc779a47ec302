"""What a plan takes for granted about the disk, checked before its commit. Reads only.

Every check raises SurgeryError: nothing was written yet, or all of it is taken back.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.hints import again, command
from ckptsurgeon.plans.edits import (
    Append,
    Computed,
    Content,
    Edit,
    Link,
    Move,
    Replace,
    Span,
    Tail,
    Truncate,
)
from ckptsurgeon.plans.plan import Fingerprint
from ckptsurgeon.plans.queries import Queries
from ckptsurgeon.plans.sources import Numbers
from ckptsurgeon.remote import reads
from ckptsurgeon.transaction.digests import anchored, digest_of
from ckptsurgeon.transaction.may_change import (
    RIGHTS,
    check_flags,
    check_rename,
    existing,
    read_only,
)
from ckptsurgeon.workers import side_by_side

AGAIN = again(why="it plans anew")
IN_PLACE = (Append, Truncate)
"""Edits of a file that stays the same one."""
Listings = Mapping[str, frozenset[str]]


# --- fingerprints --------------------------------------------------------------------------------


def check_files(root: Path, assumes: Iterable[Fingerprint]) -> Listings:
    """Compare every fingerprint with the disk; return the names in each directory among them."""

    def check(expected: Fingerprint) -> dict[str, frozenset[str]]:
        path, names = root / expected.file, {}
        status = _status(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            # The names first: a directory that changes in between has another mtime.
            names = {expected.file: _names(path)}
            status = _status(path)
        _compare(path, status, expected, whole=True)
        return names

    return {name: n for found in side_by_side(check, assumes) for name, n in found.items()}


def check_files_again(
    root: Path, assumes: Iterable[Fingerprint], listings: Listings, made: Collection[str]
) -> None:
    """Compare once more, right before the commit. By now our own lock and staging lie beside the
    run's files, so directories are compared by their names, less those in `made`."""
    ours = defaultdict(set)
    for name in made:
        ours[os.path.normpath(root / PurePosixPath(name).parent)].add(PurePosixPath(name).name)

    def check(expected: Fingerprint) -> None:
        path = root / expected.file
        _compare(path, _status(path), expected, whole=expected.file not in listings)
        if expected.file in listings:
            new = _names(path) - ours[os.path.normpath(path)]
            if new != listings[expected.file] - ours[os.path.normpath(path)]:
                raise SurgeryError(f"{path}: files came or went since the plan", next=AGAIN)

    side_by_side(check, assumes)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _compare(
    path: Path, status: os.stat_result | None, expected: Fingerprint, *, whole: bool
) -> None:
    if status is None:
        if expected.ino:
            raise SurgeryError(f"{path} has disappeared since the plan was made", next=AGAIN)
        return
    if not expected.ino:
        raise SurgeryError(f"{path} exists, but did not when the plan was made", next=AGAIN)
    if (status.st_dev, status.st_ino) != (expected.dev, expected.ino):
        raise SurgeryError(
            f"{path} was replaced by another file since the plan was made", next=AGAIN
        )
    same = (status.st_size, status.st_mtime_ns) == (expected.size, expected.mtime_ns)
    if whole and not same:
        raise SurgeryError(f"{path} was changed since the plan was made", next=AGAIN)


def _names(path: Path) -> frozenset[str]:
    return frozenset(entry.name for entry in path.iterdir())


# --- edits ---------------------------------------------------------------------------------------


def check_edits(
    root: Path,
    edits: Iterable[Edit],
    there: Collection[str] = (),
    assumes: Iterable[Fingerprint] = (),
    kept: Collection[str] = (),
    held: disk.Held | None = None,
) -> dict[str, str]:
    """Check that every edit can be done, and done again after a crash at any moment of it. Of what
    is staged, only what is `there` of an earlier attempt may have its name. What is edited in place
    is compared with what the plan `assumes` of it. The bytes that are cut off those in `kept` are
    compared when they are. Returns the sha256 of the bytes before the end of each file that grows
    (`anchored`); `held` knows the files from then on.

    `redo` sees by the names alone what is done already, so a name that one edit makes is not used
    by another; only a move may take the name that an earlier move freed. Nothing is edited inside
    a directory that moves. A file may be replaced more than once; an edit in place has its file
    alone."""
    edits = list(edits)
    expected = {each.file: each for each in assumes}
    sizes = {edit.file: _size_before(edit) for edit in edits if isinstance(edit, IN_PLACE)}
    made: list[str] = []
    used: list[str] = []
    replaced: list[str] = []
    in_place: list[Append | Truncate] = []
    freed: set[str] = set()
    changed: set[Path] = set()
    for edit in edits:
        if isinstance(edit, Move):
            _check_source(root, edit.src, edit.content, there, sizes)
            _check_absent(root, edit.dst, freed)
            check_rename(root, edit.src, edit.dst)
            changed |= _changed(root, edit.src, edit.dst)
            if edit.dst not in freed:
                made.append(edit.dst)
            freed.discard(edit.dst)
            freed.add(edit.src)
            used.append(edit.src)
        elif isinstance(edit, Replace):
            _check_source(root, edit.staged, edit.content, there, sizes)
            _check_absent(root, edit.kept, ())
            _regular(root / edit.file, or_link=True)
            check_rename(root, edit.staged, edit.file)
            changed |= _changed(root, edit.file, edit.staged, edit.kept)
            made.append(edit.kept)
            used.append(edit.staged)
            replaced.append(edit.file)
            if edit.file in freed:
                used.append(edit.file)
        else:
            in_place.append(edit)
    with disk.Folders(root / edit.file for edit in in_place) as folders:

        def check(edit: Append | Truncate) -> str:
            path = root / edit.file
            with _open(path, expected.get(edit.file), folders) as (descriptor, status):
                if held is not None:
                    held.know(path, status)  # from before it is read
                return _check_in_place(path, descriptor, status, edit, edit.file in kept)

        anchors = side_by_side(check, in_place)
    side_by_side(check_flags, sorted(changed))
    grown = [edit.file for edit in in_place]
    clash = _twice(made + grown) | _twice(used)
    clash |= set(made) & {*used, *replaced} | set(grown) & {*used, *replaced}
    names = {*made, *used, *grown, *replaced}
    for folder in [name for name in used if _is_folder(root / name)]:
        clash |= {name for name in names if name.startswith(f"{folder}/")}
    if clash:
        raise SurgeryError(f"{min(clash)}: two edits of one plan use this name", next=AGAIN)
    return dict(zip(grown, anchors, strict=True))


@contextmanager
def _open(
    path: Path, expected: Fingerprint | None, folders: disk.Folders, held: disk.Held | None = None
) -> Iterator[tuple[int, os.stat_result]]:
    """A file that is edited in place, and its status, once that is as expected. By the open file,
    which is regular, be its name what it may."""
    with ExitStack() as stack:
        try:
            opened = held.opened(path, folders) if held else disk.opened(path, within=folders)
            descriptor = stack.enter_context(opened)
        except OSError as error:
            if expected is not None:
                _compare(path, _status(path), expected, whole=True)
            _regular(path)
            why = f"{path}: {error.strerror}: it can't be edited in place"
            raise read_only(path) or SurgeryError(why, next=RIGHTS) from None
        status = os.fstat(descriptor)
        if expected is not None:
            _compare(path, status, expected, whole=True)
        yield descriptor, status


def hold(
    root: Path,
    steps: Iterable[Tail | Truncate | Move | Replace],
    assumes: Iterable[Fingerprint],
    held: disk.Held,
) -> set[str]:
    """Open the files that are edited in place, for as long as `held` has them, and compare them
    with what the plan assumes, right before the commit: of what is opened a server is asked anew.
    So are their bytes, unless it is known that nobody wrote to them since `check_edits`. Returns
    their names."""
    expected = {each.file: each for each in assumes}
    in_place = [step for step in steps if isinstance(step, (Tail, Truncate))]
    with disk.Folders(root / step.file for step in in_place) as folders:

        def check(step: Tail | Truncate) -> None:
            path = root / step.file
            with _open(path, expected.get(step.file), folders, held) as (descriptor, status):
                if not held.known(path, status) and not _is_from_before(descriptor, step):
                    raise SurgeryError(f"{path} was changed since the plan was made", next=AGAIN)

        side_by_side(check, in_place)
    return {step.file for step in in_place}


def _is_from_before(descriptor: int, step: Tail | Truncate) -> bool:
    """Whether an open file has the bytes by which its step knows it."""
    if isinstance(step, Tail):
        return digest_of(descriptor, anchored(step.old_size)) == step.anchor
    return digest_of(descriptor, step.spans) == step.digest


def _check_in_place(
    path: Path, descriptor: int, status: os.stat_result, edit: Append | Truncate, kept: bool
) -> str:
    """What `check_edits` returns of an open file."""
    if status.st_nlink > 1:
        raise SurgeryError(
            f"{path} has {status.st_nlink} names (hard links), and an edit in place changes them "
            "all",
            next=AGAIN,
        )
    if not kept or status.st_size != _size_before(edit):
        check_end(path, descriptor, edit)
    return digest_of(descriptor, anchored(edit.old_size)) if isinstance(edit, Append) else ""


def _size_before(edit: Append | Truncate) -> int:
    return edit.old_size if isinstance(edit, Append) else edit.new_size


def _is_folder(path: Path) -> bool:
    return disk.is_folder(path) and not disk.is_link(path)


def _twice(names: Iterable[str]) -> set[str]:
    return {name for name, times in Counter(names).items() if times > 1}


def _check_source(
    root: Path,
    file: str,
    content: Content | Link | Queries | None,
    ours: Collection[str] = (),
    known: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """`known` are the sizes of files that are compared with them by themselves."""
    there = disk.is_there(root / file)
    if content is None and not there:
        raise SurgeryError(f"{root / file} does not exist", next=AGAIN)
    if content is not None and there and file not in ours:
        raise SurgeryError(f"{root / file}: a file is in the way of the staged one", next=AGAIN)
    if isinstance(content, Queries):
        from ckptsurgeon.transaction import databases

        databases.refuse_live(root / content.file)
    ranges: list[tuple[str, int, int]] = []
    for piece in content.pieces if isinstance(content, Content) else ():
        spans: list[Span | Numbers] = [piece] if isinstance(piece, Span) else []
        if isinstance(piece, Computed):
            spans += [source for term in piece.terms for source in term]
        ranges += (read for span in spans for read in span.ranges())
    files = list(dict.fromkeys(name for name, _, _ in ranges))
    asked = [name for name in files if name not in known]
    found = side_by_side(lambda name: _size(root / name), asked)
    sizes = {**known, **dict(zip(asked, found, strict=True))}
    for name, start, end in ranges:
        if not 0 <= start <= end <= sizes[name]:
            raise SurgeryError(
                f"{root / name} has {count(sizes[name], 'byte')}, and the plan reads {start} to "
                f"{end}",
                next=AGAIN,
            )


def _check_absent(root: Path, file: str, freed: Collection[str]) -> None:
    if file not in freed and disk.is_there(root / file):
        raise SurgeryError(f"{root / file}: a file of this name is in the way", next=AGAIN)


def _changed(root: Path, *files: str) -> set[Path]:
    """What a rename of these changes, as far as it is there: the files, and the folders of their
    names."""
    paths = [root / file for file in files]
    return {path for path in paths if disk.is_there(path)} | {
        existing(path.parent) for path in paths
    }


def _regular(path: Path, *, or_link: bool = False) -> os.stat_result:
    """The status of what must be a file. Raises SurgeryError where it is not, or is not there."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        raise SurgeryError(f"{path} does not exist", next=AGAIN) from None
    if not (stat.S_ISREG(info.st_mode) or (or_link and stat.S_ISLNK(info.st_mode))):
        raise SurgeryError(f"{path} is not a regular file", next=AGAIN)
    return info


def check_size(path: Path, edit: Append | Truncate) -> None:
    """Check that the file ends as the edit needs it; for `Truncate`, in the bytes that go."""
    try:
        descriptor = reads.opened(path)
    except FileNotFoundError:
        raise SurgeryError(f"{path} does not exist", next=AGAIN) from None
    try:
        reads.need(descriptor, edit.spans if isinstance(edit, Truncate) else ())
        check_end(path, descriptor, edit)
    finally:
        os.close(descriptor)


def check_end(path: Path, descriptor: int, edit: Append | Truncate) -> None:
    """The same of an open file."""
    size = os.fstat(descriptor).st_size
    if isinstance(edit, Append):
        if size != edit.old_size:
            what = f"{path} has {count(size, 'byte')}, not the {edit.old_size} of the plan"
            raise SurgeryError(what, next=AGAIN)
    elif size != edit.new_size or digest_of(descriptor, edit.spans) != edit.digest:
        raise SurgeryError(
            f"{path}: the bytes after {edit.old_size} are not those that this surgery wrote: the "
            "file was changed or saved again since",
            next=command("verify", why="see whether it is sound now"),
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise SurgeryError(f"{path} does not exist", next=AGAIN) from None
