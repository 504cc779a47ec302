"""Seeded bugs: each is one mistake that the journal could have, and that a harness must find."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ckptsurgeon import disk
from ckptsurgeon.disk import files
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.transaction import journal, receipts, redo, renames, staging

Bug = Callable[[], Iterator[tuple[Any, str, Callable[..., Any]]]]
BUGS: dict[str, Bug] = {}
"""Name → what it replaces: module, attribute, the wrong function."""


@contextmanager
def seeded(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, wrong in BUGS[name]():
            stack.enter_context(patch.object(owner, attribute, wrong))
        yield


def _bug(make: Bug) -> Bug:
    BUGS[make.__name__.strip("_").replace("_", " ")] = make
    return make


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _except(right: Callable[..., Any], skip: Callable[[str], bool], at: int) -> Callable[..., Any]:
    """`right`, but not for the paths (argument number `at`) that `skip` picks."""

    def wrong(*arguments: Any, **named: Any) -> Any:
        return None if skip(str(arguments[at])) else right(*arguments, **named)

    return wrong


def _fsync_file(skip: Callable[[str], bool]) -> Iterator[tuple[Any, str, Any]]:
    """For those who call it, and for `write_new` beside it."""
    for module in (disk, files):
        yield module, "fsync_file", _except(files.fsync_file, skip, 1)


@_bug
def _staged_bytes_not_fsynced() -> Iterator[tuple[Any, str, Any]]:
    yield from _fsync_file(lambda path: "/staging/" in path)


@_bug
def _staged_names_not_fsynced() -> Iterator[tuple[Any, str, Any]]:
    yield disk, "fsync_directory", _except(disk.fsync_directory, lambda p: "/staging" in p, 0)


@_bug
def _no_directory_fsynced() -> Iterator[tuple[Any, str, Any]]:
    yield disk, "fsync_directory", _nothing


@_bug
def _journal_renamed_before_its_bytes_are_durable() -> Iterator[tuple[Any, str, Any]]:
    yield from _fsync_file(lambda path: path.endswith("journal.new"))


@_bug
def _commit_record_not_durable_before_redo() -> Iterator[tuple[Any, str, Any]]:
    yield (
        disk,
        "fsync_directory",
        _except(disk.fsync_directory, lambda path: path.endswith("run/.ckptsurgeon"), 0),
    )


@_bug
def _end_record_written_before_the_rest_is_durable() -> Iterator[tuple[Any, str, Any]]:
    yield disk, "fsync_data", _nothing


@_bug
def _appended_bytes_never_fsynced() -> Iterator[tuple[Any, str, Any]]:
    yield disk, "fsync_data", _nothing
    yield from _fsync_file(lambda path: "/.ckptsurgeon/" not in path)


@_bug
def _end_record_written_first() -> Iterator[tuple[Any, str, Any]]:
    right = redo._append

    def wrong(root: Path, group: Sequence[redo.Tail], tails: Path, *rest: Any) -> None:
        for step in group:
            offset = step.at + sum(end - start for start, end in step.spans[:-1])
            start, end = step.spans[-1]
            with disk.opened(root / step.file) as file, tails.open("rb") as staged:
                staged.seek(offset)
                disk.write_at(file, root / step.file, start, staged.read(end - start))
        right(root, group, tails, *rest)

    yield redo, "_append", wrong


@_bug
def _pointer_truncated_in_place() -> Iterator[tuple[Any, str, Any]]:
    def wrong(root: Path, step: Any) -> None:
        staged, file = root / step.staged, root / step.file
        if staged.exists():
            data = staged.read_bytes()
            with disk.opened(file) as descriptor:
                disk.truncate(descriptor, file, 0)
                disk.write_at(descriptor, file, 0, data)
                disk.fsync_file(descriptor, file)
            disk.remove_file(staged)

    yield renames, "_swap", wrong


@_bug
def _no_commit_record() -> Iterator[tuple[Any, str, Any]]:
    right = journal.write
    yield (
        journal,
        "write",
        lambda root, entry, *check: None if entry.committed else right(root, entry, *check),
    )


@_bug
def _no_intent_record() -> Iterator[tuple[Any, str, Any]]:
    right = journal.write
    yield (
        journal,
        "write",
        lambda root, entry, *check: right(root, entry, *check) if entry.committed else None,
    )


@_bug
def _no_clean_up_after_an_error() -> Iterator[tuple[Any, str, Any]]:
    yield journal, "_discard", _nothing


@_bug
def _exit_1_after_the_commit_point() -> Iterator[tuple[Any, str, Any]]:
    yield journal, "cut_short", lambda title, error: SurgeryError(f"{title}: {error}", next="y")


@_bug
def _shards_not_silenced_first() -> Iterator[tuple[Any, str, Any]]:
    yield redo, "_silence", _nothing


@_bug
def _silence_not_durable() -> Iterator[tuple[Any, str, Any]]:
    def wrong(root: Path, step: redo.Tail, *_: Any) -> None:
        path = root / step.file
        with disk.opened(path) as descriptor:
            if os.fstat(descriptor).st_size < step.cut:
                disk.truncate(descriptor, path, step.cut)

    yield redo, "_silence", wrong


@_bug
def _shards_truncated_one_after_the_other() -> Iterator[tuple[Any, str, Any]]:
    yield redo, "_cut", redo._restore


@_bug
def _original_not_kept() -> Iterator[tuple[Any, str, Any]]:
    yield renames, "_keep", _nothing


@_bug
def _original_renamed_away_first() -> Iterator[tuple[Any, str, Any]]:
    def wrong(root: Path, step: Any) -> None:
        if not (root / step.kept).exists():
            disk.rename(root / step.file, root / step.kept)

    yield renames, "_keep", wrong


@_bug
def _journal_removed_before_the_staging() -> Iterator[tuple[Any, str, Any]]:
    right = staging.remove

    def wrong(root: Path, files: Sequence[str], directories: Sequence[str]) -> None:
        right(root, [".ckptsurgeon/journal"], [])
        right(root, files, directories)

    yield staging, "remove", wrong


@_bug
def _receipt_in_place_before_the_edits() -> Iterator[tuple[Any, str, Any]]:
    right = redo.redo

    def wrong(root: Path, steps: Any, tails: Path, *rest: Any) -> None:
        for staged, final in receipts.records(tails.name.partition(".")[0]).items():
            disk.rename(root / staged, root / final)
            disk.fsync_directory((root / final).parent)
        right(root, steps, tails, *rest)

    yield journal, "redo", wrong


@_bug
def _moves_not_durable() -> Iterator[tuple[Any, str, Any]]:
    yield renames, "_fsync_parents", _nothing


@_bug
def _records_of_a_killed_attempt_not_fsynced() -> Iterator[tuple[Any, str, Any]]:
    right, renamed = disk.fsync_directory, set[str]()

    def rename(source: Path, target: Path, right: Any = disk.rename) -> None:
        right(source, target)
        renamed.add(str(target.parent))

    def wrong(path: Path) -> None:
        if "/receipts/" not in str(path) or str(path) in renamed:
            renamed.discard(str(path))
            right(path)

    yield disk, "rename", rename
    yield disk, "fsync_directory", wrong


@_bug
def _replaced_twice_at_once() -> Iterator[tuple[Any, str, Any]]:
    yield redo, "Counter", lambda names: Counter()


@_bug
def _freed_name_taken_before_it_is_durable() -> Iterator[tuple[Any, str, Any]]:
    def wrong(root: Path, group: Sequence[Any]) -> None:
        for step in group:
            if not (root / step.dst).exists():
                disk.rename(root / step.src, root / step.dst)
        renames._fsync_parents(root, (n for step in group for n in (step.src, step.dst)), 1)

    yield renames, "move", wrong
