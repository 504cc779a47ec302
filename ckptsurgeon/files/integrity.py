"""Megatron-LM's `integrity.json`: the sha256 of every file of a checkpoint folder.

Source: `megatron/core/dist_checkpointing/validation.py`, `save_integrity_manifest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Append, Content, Hole
from ckptsurgeon.errors import DamagedFile, SurgeryError

MANIFEST = "integrity.json"
MAX_BYTES = 64 << 20
CHUNK = 1 << 20


def read(folder: Path) -> dict[str, str]:
    """File name → sha256 in hexadecimal; empty when the folder has no manifest.

    Raises DamagedFile if it is none that Megatron-LM writes."""
    try:
        return dict(_document(folder)["files"])
    except FileNotFoundError:
        return {}


def refreshed(folder: Path, rendered: Mapping[Path, Append | Content], root: Path) -> Content:
    """The manifest once `rendered` (file → its new bytes) is on disk.

    Raises SurgeryError if one of the files is not what the manifest says now: a new sum would hide
    the damage."""
    document = _document(folder)
    known = document["files"]
    for path, new in rendered.items():
        if path.name in known and (found := _digest(_bytes(path, 0, None))) != known[path.name]:
            raise SurgeryError(
                f"{path}: its sha256 is {found[:16]}…, and {MANIFEST} has {known[path.name][:16]}…",
                next="ckptsurgeon verify --level 3    every file that differs",
            )
        known[path.name] = _digest(_rendered(path, new, root))
    document["files"] = dict(sorted(known.items()))
    return Content((json.dumps(document, indent=2).encode(),))


def _document(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if path.stat().st_size > MAX_BYTES:
        raise DamagedFile(str(path), 0, f"it is longer than {MAX_BYTES} bytes")
    try:
        document = json.loads(path.read_text("utf-8"))
        files = document["files"]
        right = document.get("algorithm", "sha256") == "sha256" and isinstance(files, dict)
        right = right and all(isinstance(value, str) for value in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        right = False
    if not right:
        raise DamagedFile(str(path), 0, "it is no manifest of sha256 sums")
    return document  # type: ignore[no-any-return]


def _rendered(path: Path, new: Append | Content, root: Path) -> Iterator[bytes]:
    if isinstance(new, Content):
        for piece in new.pieces:
            if isinstance(piece, bytes):
                yield piece
            elif isinstance(piece, Hole):
                yield from (
                    bytes(min(CHUNK, piece.size - at)) for at in range(0, piece.size, CHUNK)
                )
            else:
                yield from _bytes(root / piece.file, piece.start, piece.end)
        return
    yield from _bytes(path, 0, new.old_size)
    at = new.old_size
    for offset, data in new.writes:
        for begin in range(at, offset, CHUNK):
            yield bytes(min(CHUNK, offset - begin))
        yield data
        at = offset + len(data)


def _bytes(path: Path, start: int, end: int | None) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while data := file.read(CHUNK if end is None else min(CHUNK, end - file.tell())):
            yield data


def _digest(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
