"""Safetensors files beside a checkpoint's torch files: their tensors are found, and made anew.

Only the bytes of the tensors change: the header, and with it every name and shape, stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.safetensors import SafetensorsFile
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Place
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import (
    ZEROS,
    Append,
    Change,
    Computed,
    Content,
    Elements,
    Fill,
    Hole,
    Piece,
    Span,
)


@dataclass
class SafetensorsBeside(Checkpoint):
    """Those that were asked for (`tensors`) are among the archives, as only some operations need
    the weights. A place in such a file has the path (name,), and in a flattened one its keys."""

    def tensors(self, file: Path) -> Mapping[str, Place]:
        """Name → place of every tensor of a file. Raises DamagedFile."""
        if file not in self.archives:
            self.archives[file] = SafetensorsFile.open(file)
        tree = self.archives[file].tree()
        return {name: Place(file, (name,), tensor) for name, tensor in tree.items()}

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """A new file with the bytes of the old one, but for the tensors that change."""
        rest, out = dict(changes), dict[str, Append | Content]()
        for file, edits in changes.items():
            archive = self.archives.get(root / file)
            if isinstance(archive, SafetensorsFile):
                out[file] = Content(tuple(self._pieces(archive, file, edits)))
                del rest[file]
        return {**super().render(rest, root), **out}

    def _pieces(
        self, archive: SafetensorsFile, file: str, changes: Sequence[Change]
    ) -> Iterator[Piece]:
        found = []
        for change in changes:
            for path in change.paths():
                tensor = get(archive.tree(), path)
                place = Place(archive.path, path, tensor)
                _, start, end = self.span(place, *(change.elements or (0, tensor.numel)))
                found.append((start, end, _new(archive, tensor, file, change, end - start)))
        at = 0
        for start, end, new in sorted(found, key=lambda item: item[0]):
            if at < start:
                yield Span(file, at, start)
            yield new
            at = end
        if at < archive.size:
            yield Span(file, at, archive.size)


def _new(archive: SafetensorsFile, tensor: Tensor, file: str, change: Change, size: int) -> Piece:
    """The `size` bytes that a change puts in place of elements. Raises SurgeryError for what no
    bytes of them are, as of a tensor that is taken out."""
    new = change.new
    if isinstance(new, Computed):
        return new
    if isinstance(new, Elements) and len(new.data) == size:
        return new.data
    if new == ZEROS:
        return Hole(size)
    if isinstance(new, Fill) and ITEM_BYTES[tensor.dtype] == 1:
        return bytes([new.byte]) * size
    if isinstance(new, (bool, int, float)) and tensor.numel == 1:
        return archive.encode(tensor.dtype, new)
    raise SurgeryError(
        f"{file}: {tensor.storage} can't become {new}",
        next=command("show", why="what the checkpoint keeps"),
    )
