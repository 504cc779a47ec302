"""The one snapshot: what a folder holds, so that a test can compare two moments of it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

HOME = ".ckptsurgeon"
"""The surgeon's own folder in a run, and beside logs that lie elsewhere."""

Snapshot = dict[str, tuple[str, str, int]]
"""Path → kind, SHA-256 of the bytes (or the link's text), and the modification time of a file."""


def snapshot(root: Path, *, own: bool = False) -> Snapshot:
    """Every name below `root` outside the surgeon's own folders; with `own`, those too: without
    their times, and a receipt and its record, which hold times, only as there."""
    found: Snapshot = {}
    for name, info in walk(root, own):
        inside = own and HOME in name
        if stat.S_ISDIR(info.st_mode):
            found[name] = ("folder", "", 0)
        elif inside and name.endswith(("/receipt.json", "/kept.json")):
            found[name] = ("receipt", "", 0)
        else:
            time = 0 if inside or stat.S_ISLNK(info.st_mode) else info.st_mtime_ns
            found[name] = (_kind(info), _content(f"{root}/{name}", info), time)
    return found


def exact_snapshot(root: Path) -> Snapshot:
    """`root` and every name below it, the surgeon's own too, with permissions, number of links and
    time, also of folders: what a command that is refused leaves as it was."""
    found: Snapshot = {}
    for name, info in [("", root.lstat()), *walk(root, own=True)]:
        content = "" if stat.S_ISDIR(info.st_mode) else _content(f"{root}/{name}", info)
        kind = f"{_kind(info)} {info.st_mode:o} {info.st_nlink}"
        found[name] = (kind, content, info.st_mtime_ns)
    return found


def differs(found: Snapshot, wanted: Snapshot, *, times: bool) -> str | None:
    """The first difference between two snapshots, or None."""
    for name in sorted({*found, *wanted}):
        if name not in found:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is left behind"
        if found[name][:2] != wanted[name][:2]:
            return f"{name} has other bytes"
        if times and found[name][2] != wanted[name][2]:
            return f"{name} has another time"
    return None


def walk(root: Path, own: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Every name below `root`, parents first. (Plain `os`: sweeps spend their time here.)"""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(f"{root}/{folder}") as entries:
            for entry in entries:
                if entry.name == HOME and not own:
                    continue
                name = f"{folder}{entry.name}"
                info = entry.stat(follow_symlinks=False)
                yield name, info
                if stat.S_ISDIR(info.st_mode):
                    folders.append(f"{name}/")


def _kind(info: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "folder"}
    return kinds.get(stat.S_IFMT(info.st_mode), "other")


def _content(path: str, info: os.stat_result) -> str:
    if stat.S_ISLNK(info.st_mode):
        return os.readlink(path)  # noqa: PTH115 (a string, not a Path: sweeps spend their time here)
    if not stat.S_ISREG(info.st_mode):  # a pipe would wait
        return ""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        digest = hashlib.sha256()
        while data := os.read(descriptor, 1 << 20):
            digest.update(data)
        return digest.hexdigest()
    finally:
        os.close(descriptor)
