"""Weights in safetensors files beside a checkpoint's torch files: found, and computed anew.

Only the bytes of the tensors change: the header, and with it every name and shape, stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.safetensors import SafetensorsFile
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import Place
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Append, Change, Computed, Content, Piece, Span


@dataclass
class SafetensorsBeside(Checkpoint):
    """Those that were asked for (`tensors`) are among the archives, as only some operations need
    the weights. A place in such a file has the path (name,)."""

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

    def _pieces(self, archive: Archive, file: str, changes: Sequence[Change]) -> Iterator[Piece]:
        found = []
        for change in changes:
            if not isinstance(change.new, Computed):
                raise SurgeryError(
                    f"{file}: {change.path[0]} can't become {change.new}",
                    next=command("show", why="what the checkpoint keeps"),
                )
            for path in change.paths():
                tensor = archive.tree()[path[0]]
                place = Place(archive.path, path, tensor)
                _, start, end = self.span(place, *(change.elements or (0, tensor.numel)))
                found.append((start, end, change.new))
        at = 0
        for start, end, new in sorted(found, key=lambda item: item[0]):
            if at < start:
                yield Span(file, at, start)
            yield new
            at = end
        if at < archive.size:
            yield Span(file, at, archive.size)
