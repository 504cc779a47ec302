"""The torch files of a saved step, opened once, and the tree that each of them holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptsurgeon.files.archives.archive import PICKLE, Archive

KEPT_SCANS = 2 << 20
"""Bytes of pickle whose scans are kept from reading to rendering: a scan is 20 times as large."""


def opened(paths: Iterable[Path], known: Archive | None = None) -> dict[Path, Archive]:
    """The archive of each path, `known` among them if its file is as it was. The scans of the
    first ones are kept for a later edit, up to KEPT_SCANS bytes of pickle."""
    have = {known.path: known} if known is not None and known.is_current() else {}
    archives = {path: have.get(path) or Archive.open(path) for path in paths}
    room = KEPT_SCANS
    for archive in archives.values():
        room -= archive.record(PICKLE).size
        if room >= 0:
            with archive.reading():
                archive.scan(keep=True)
    return archives


def read_shards(
    paths: Iterable[Path], known: Archive | None = None
) -> tuple[dict[Path, Any], dict[Path, Archive]]:
    """The tree and the archive of each path; see `opened`."""
    archives = opened(paths, known)
    trees = {}
    for path, archive in archives.items():
        with archive.reading():
            trees[path] = archive.tree()
    return trees, archives
