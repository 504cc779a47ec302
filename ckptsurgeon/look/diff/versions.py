"""One file as it is or as it was, and the trees in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptsurgeon import whole_file
from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dcp import METADATA, Saved, Whole
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.fields.constants import PICKLED, TORCH
from ckptsurgeon.look.diff.leaves import Leaves, leaves
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.frozen import frozen

TREES = (*TORCH, PICKLED)
"""How the names of files end in which there is a tree."""
SMALL = 8 << 20
"""Bytes of the largest file of text that is read."""


@frozen
class Version:
    """The bytes of one file: those at `path`, or its first `size`. `folder` is where the files that
    it names lie, if it is not its own; `called` is its own name, where an attic has another."""

    path: Path
    size: int | None = None
    folder: Path | None = None
    called: str = ""

    @property
    def name(self) -> str:
        """By which it is known what kind of file it is."""
        return self.called or self.path.name

    @property
    def is_tree(self) -> bool:
        """Whether there is a pickle in it."""
        return self.name.endswith(TREES)

    def content(self) -> Content:
        """What it holds, by the kind of file that it is."""
        name = self.name
        if name == METADATA or (self.folder is not None and name.endswith(METADATA)):
            return _of_dcp(Saved.open(self.folder or self.path.parent, self.path))
        if self.is_tree:
            try:
                archive = Archive.open(self.path, 0, self.size)
                found = leaves(archive.tree(), archive)
            except DamagedFile:
                if not name.endswith(PICKLED):
                    raise
                return Content({(): ("bytes", self.length())})
            return _sorted(found, archive)
        if self.length() <= SMALL and name.endswith((".json", ".txt", ".yaml")):
            return Content(_of_text(whole_file.read(self.path, SMALL), name))
        return Content({(): ("bytes", self.length())})

    def length(self) -> int:
        """Of the file in bytes."""
        return self.path.stat().st_size if self.size is None else self.size

    def same_bytes(self, other: Version) -> bool:
        """Whether the two are one file, or have the same few bytes."""
        mine, its = self.path.stat(), other.path.stat()
        if self.length() != other.length():
            return False
        return (mine.st_dev, mine.st_ino) == (its.st_dev, its.st_ino)


@frozen
class Held:
    """A tensor and its archive; one in chunks (`Whole`) has an archive for each of them."""

    tensor: Tensor
    archive: Archive | None = None

    def pieces(self) -> Iterator[tuple[Archive, Tensor]]:
        """All elements in the order of its shape, or chunk by chunk."""
        if isinstance(self.tensor, Whole):
            yield from self.tensor.pieces()
            return
        assert self.archive is not None
        yield self.archive, self.tensor


@dataclass
class Content:
    """The leaves of one file, without its tensors, and the tensors."""

    leaves: Leaves
    tensors: dict[tuple[Key, ...], Held] = field(default_factory=dict)


def _sorted(found: Leaves, archive: Archive) -> Content:
    held = {p: Held(leaf, archive) for p, leaf in found.items() if isinstance(leaf, Tensor)}
    return Content({p: leaf for p, leaf in found.items() if p not in held}, held)


def _of_dcp(saved: Saved) -> Content:
    """Values by their name and path, tensors by name; by name and chunk where `.metadata` does not
    say what they are."""
    values: Leaves = {}
    tensors: dict[tuple[Key, ...], Held] = {}
    for name, items in saved.items.items():
        if items.is_tensor and items.is_described and not items.is_number:
            tensors[name,] = Held(saved.value(name))
            continue
        for number, item in enumerate(items):
            archive = saved.archive(item)
            base: tuple[Key, ...] = (name,) if item.offset is None else (name, number)
            inner = _sorted(leaves(archive.tree(), archive), archive)
            values |= {base + path: leaf for path, leaf in inner.leaves.items()}
            tensors |= {base + path: held for path, held in inner.tensors.items()}
    return Content(values, tensors)


def _of_text(data: bytes, name: str) -> Leaves:
    text = data.decode("utf-8", "replace")
    if name.endswith(".json"):
        try:
            return dict(_of_json((), json.loads(text)))
        except (ValueError, RecursionError):
            pass
    return {(): text}


def _of_json(path: tuple[Key, ...], value: Any) -> list[tuple[tuple[Key, ...], Any]]:
    if isinstance(value, dict):
        return [leaf for k, item in value.items() for leaf in _of_json((*path, k), item)]
    return [(path, value)]
