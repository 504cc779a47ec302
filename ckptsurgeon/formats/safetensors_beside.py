"""Weights in safetensors files beside a checkpoint's torch files: found, and computed anew.

Only the bytes of the tensors change: the header, and with it every name and shape, stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptsurgeon.edits import Append, Change, Computed, Content, Piece, Span
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import safetensors_header
from ckptsurgeon.files.dtypes import ITEM_BYTES
from ckptsurgeon.files.safetensors_header import Header
from ckptsurgeon.formats.checkpoint import BaseCheckpoint
from ckptsurgeon.formats.values import Place


@dataclass
class SafetensorsBeside(BaseCheckpoint):
    """`safetensors` are those that were asked for (`tensors`), as only some operations need the
    weights. A place in such a file has the path (name,)."""

    safetensors: dict[Path, Header] = field(kw_only=True, default_factory=dict)

    def tensors(self, file: Path) -> Mapping[str, Place]:
        """Name → place of every tensor of a file. Raises DamagedFile."""
        if file not in self.safetensors:
            self.safetensors[file] = safetensors_header.read(file)
        found = self.safetensors[file].tensors
        return {name: Place(file, (name,), tensor) for name, (tensor, _) in found.items()}

    def span(self, place: Place, start: int, end: int) -> tuple[Path, int, int]:
        """By the header."""
        if place.file not in self.safetensors:
            return super().span(place, start, end)
        tensor, first = self.safetensors[place.file].tensors[str(place.path[0])]
        item = ITEM_BYTES.get(tensor.dtype, 1)
        return place.file, first + start * item, first + end * item

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """A new file with the bytes of the old one, but for the tensors that change."""
        mine = {file: edits for file, edits in changes.items() if root / file in self.safetensors}
        rest = {file: edits for file, edits in changes.items() if file not in mine}
        out: dict[str, Append | Content] = {}
        for file, edits in mine.items():
            pieces = tuple(self._pieces(root / file, file, edits))
            out[file] = Content(pieces)
        return {**super().render(rest, root), **out}

    def _pieces(self, path: Path, file: str, changes: Sequence[Change]) -> Iterator[Piece]:
        header = self.safetensors[path]
        found = []
        for change in changes:
            if not isinstance(change.new, Computed):
                raise SurgeryError(f"{file}: {change.path[0]} can't become {change.new}")
            tensor, _ = header.tensors[str(change.path[0])]
            place = Place(path, change.path, tensor)
            _, start, end = self.span(place, *(change.elements or (0, tensor.numel)))
            found.append((start, end, change.new))
        at = 0
        for start, end, new in sorted(found, key=lambda item: item[0]):
            if at < start:
                yield Span(file, at, start)
            yield new
            at = end
        if at < header.size:
            yield Span(file, at, header.size)
