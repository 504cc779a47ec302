"""The torch files of a saved step, opened once, and the tree that each of them holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptsurgeon.files.archives.archive import PICKLE, Archive

KEPT_SCANS = 2 << 20
"""Bytes of pickle whose scans are kept from reading to rendering: a scan is 20 times as large."""


def opened(paths: Iterable[Path], known: Archive | None = None) -> dict[Path, Archive]:
    """The archive of each path with its tree, read while the file is open once; `known` is among
    them if its file is as it was. The scans of the first ones are kept for a later edit, up to
    KEPT_SCANS bytes of pickle."""
    have = {known.path: known} if known is not None and known.is_current() else {}
    archives: dict[Path, Archive] = {}
    room = KEPT_SCANS
    for path in paths:
        with have[path].reading() if path in have else Archive.opening(path) as archive:
            room -= archive.record(PICKLE).size
            if room >= 0:
                archive.scan(keep=True)
            archive.tree()
            archives[path] = archive
    return archives


def read_shards(
    paths: Iterable[Path], known: Archive | None = None
) -> tuple[dict[Path, Any], dict[Path, Archive]]:
    """The tree and the archive of each path; see `opened`."""
    archives = opened(paths, known)
    return {path: archive.tree() for path, archive in archives.items()}, archives
