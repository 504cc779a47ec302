"""Megatron-LM's `integrity.json`: the sha256 of every file of a checkpoint folder.

Source: `megatron/core/dist_checkpointing/validation.py`, `save_integrity_manifest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon import whole_file
from ckptsurgeon.errors import DamagedFile, SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Append, Content
from ckptsurgeon.transaction.content import read as read_content

MANIFEST = "integrity.json"
MAX_BYTES = 64 << 20
CHUNK = 1 << 20


def read(folder: Path) -> dict[str, str]:
    """File name → sha256 in hexadecimal; empty when the folder has no manifest.

    Raises DamagedFile if it is not one that Megatron-LM writes."""
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
        if path.name in known and (before := sha256(path)) != known[path.name]:
            raise SurgeryError(
                f"{path}: its sha256 is {before[:16]}…, and {MANIFEST} has "
                f"{known[path.name][:16]}…",
                next=command("verify", "--level", "3", why="every file that differs"),
            )
        content = new.whole() if isinstance(new, Append) else new
        known[path.name] = _sha256_of(content, root)
    document["files"] = dict(sorted(known.items()))
    return Content((json.dumps(document, indent=2).encode(),))


def _document(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if path.stat().st_size > MAX_BYTES:
        raise DamagedFile(str(path), 0, f"it is longer than {MAX_BYTES} bytes")
    try:
        document = json.loads(whole_file.read(path, MAX_BYTES))
        files = document["files"]
        algorithm = document.get("algorithm", "sha256")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        files, algorithm = None, None
    sums = files.values() if isinstance(files, dict) else [None]
    if algorithm != "sha256" or not all(isinstance(value, str) for value in sums):
        raise DamagedFile(str(path), 0, "it is not a manifest of sha256 sums")
    return document  # type: ignore[no-any-return]


def sha256(path: Path) -> str:
    """The sum of a file, in hexadecimal. Raises OSError if it can't be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


def _sha256_of(content: Content, root: Path) -> str:
    digest = hashlib.sha256()
    for data in read_content(root, content):
        digest.update(data)
    return digest.hexdigest()
