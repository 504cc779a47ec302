"""The torch files of a saved step, opened once, and the tree that each of them holds."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptsurgeon.files.archives.archive import PICKLE, Archive
from ckptsurgeon.workers import side_by_side

KEPT_SCANS = 2 << 20
"""Bytes of pickle whose scans are kept from reading to rendering: a scan is 20 times as large."""
_parsed = 0
"""Bytes of pickle that threads parse at this moment."""
_parsing = threading.Condition()


def opened(paths: Iterable[Path], known: Archive | None = None) -> dict[Path, Archive]:
    """The archive of each path with its tree, read while the file is open once; `known` is among
    them if its file is as it was. The scans of the first ones are kept for a later edit, up to
    KEPT_SCANS bytes of pickle."""
    have = {known.path: known} if known is not None and known.is_current() else {}
    room, deciding = KEPT_SCANS, threading.Lock()

    def read(path: Path) -> Archive:
        nonlocal room
        with have[path].reading() if path in have else Archive.opening(path) as archive:
            size = archive.record(PICKLE).size
            with parsing(size):
                with deciding:
                    room -= size
                    kept = room >= 0
                if kept:
                    archive.scan(keep=True)
                archive.tree()
            archive.read_numbers()
            return archive

    paths = list(paths)
    return dict(zip(paths, side_by_side(read, paths), strict=True))


@contextmanager
def parsing(size: int) -> Iterator[None]:
    """Wait until a pickle of `size` bytes may be parsed: threads parse KEPT_SCANS bytes at once, or
    a single larger one. Else each of them would have the scan of a large one in memory."""
    global _parsed
    size = min(size, KEPT_SCANS)
    with _parsing:
        _parsing.wait_for(lambda: _parsed + size <= KEPT_SCANS)
        _parsed += size
    try:
        yield
    finally:
        with _parsing:
            _parsed -= size
            _parsing.notify_all()


def read_shards(
    paths: Iterable[Path], known: Archive | None = None
) -> tuple[dict[Path, Any], dict[Path, Archive]]:
    """The tree and the archive of each path; see `opened`."""
    archives = opened(paths, known)
    return {path: archive.tree() for path, archive in archives.items()}, archives
