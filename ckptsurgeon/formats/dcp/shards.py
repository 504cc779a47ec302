"""One saved step that torch.distributed.checkpoint wrote, with or without torch files beside it.

What it holds is addressed through its `.metadata`: (name, key, …) leads into a value, (name,) to a
tensor with all of its chunks, (name, 0) to the first chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count as counted
from itertools import takewhile
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import count
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.dcp import METADATA, NEW, Saved, Whole
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats.capabilities import HasArchives, HasWeights, NamesMoments
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.fields.understood import problem
from ckptsurgeon.formats.fields.values import MOMENTS, Blob, Box, Part, Place, Weight
from ckptsurgeon.plans.edits import Append, Change, Content, Key


@dataclass
class DcpShards(Checkpoint, NamesMoments, HasWeights, HasArchives):
    """`Checkpoint`, where some of the trees are `Values`: that of `saved`, and those of other
    `folders`."""

    saved: Saved = field(kw_only=True)

    def __post_init__(self) -> None:
        self.folders = {self.saved.path: self.saved}
        """By the path of its `.metadata`."""
        super().__post_init__()

    def at(self, file: Path, path: tuple[Key, ...], wins: bool = True) -> list[Place]:
        """The place `path` of `file` with its plain value, or nothing if it is not there."""
        saved = self.folders.get(file)
        if saved is None:
            return super().at(file, path, wins)
        try:
            value = get(self.trees[file], path)
        except KeyError:
            return []
        if isinstance(value, Tensor) and not isinstance(value, Whole) and value.numel == 1:
            value = saved.archive(saved.of(path)).value(value)
        return [placed(file, path, value, wins)]

    def scalar(self, name: str, wins: bool = True, saved: Saved | None = None) -> list[Place]:
        """The place of a number, kept as a value or as a tensor of one element, in `saved`."""
        saved = saved or self.saved
        items = saved.items.get(name)
        if items is None:
            return []
        return self.at(saved.path, (name, 0) if items.is_tensor else (name,), wins)

    def listed(self, name: str) -> list[Place]:
        """The place of each number of a list of tensors, which torch gives a name each."""
        items = self.saved.items
        names = takewhile(items.__contains__, (f"{name}.{i}" for i in counted()))
        return [place for each in names if items[each].is_tensor for place in self.scalar(each)]

    def moments(self, name: str) -> list[Place]:
        """Every tensor with `name` in its own; one of one element is a tensor too."""
        return [
            placed(saved.path, path, get(self.trees[saved.path], path))
            for saved in self.folders.values()
            for fqn, items in saved.items.items()
            if name in fqn.split(".") and items.is_tensor
            for path in saved.paths(fqn)
        ]

    def chunks(self, saved: Saved, name: str, parameter: str, kind: str) -> Iterator[Part]:
        """Of the tensor `name` in `saved`, each chunk as a cut of its own; none of a value that is
        no tensor, and of one that is not there."""
        items = saved.items.get(name)
        if items is None or not items.is_tensor:
            return
        shape = items.whole[1] if items.whole is not None else ()
        for chunk, item in enumerate(items):
            tensor = self.trees[saved.path][name][chunk]
            offset = item.offset or ()
            known = len(offset) == len(shape) == len(tensor.size)
            box = Box(shape, offset, tensor.size) if known else None
            place = Place(saved.path, (name, chunk), tensor)
            yield Part.whole(parameter, ".".join(map(str, offset)), kind, place, box)

    def holder(self, place: Place) -> Archive:
        """That of the item, inside its file."""
        saved = self.folders.get(place.file)
        return super().holder(place) if saved is None else saved.archive(saved.of(place.path))

    def is_zero(self, place: Place, elements: tuple[int, int] | None = None) -> bool:
        """By the CRC of the tensor's storage; False when it can't be told without a read."""
        saved = self.folders.get(place.file)
        if saved is None or not isinstance(place.value, Tensor):
            return super().is_zero(place, elements)
        if isinstance(place.value, Whole):
            return place.value.numel == 0 or saved.is_zero(str(place.path[0]))
        archive = saved.archive(saved.of(place.path))
        return place.value.numel == 0 or archive.is_zero(place.value)

    def fragments(self, name: str) -> list[Part]:
        """Each tensor is of one parameter, and is zeroed as a whole. Raises SurgeryError where the
        tensors are flat buckets."""
        out = []
        for place in self.moments(name):
            fqn = str(place.path[0])
            if ".bucket_idx_" in fqn:
                raise NamesMoments.lacking(self)
            parts = [part for part in fqn.split(".") if part != name]
            parameter = ".".join(parts[parts.index("state") + 1 :] if "state" in parts else parts)
            out.append(Part.whole(self.full(place.file, parameter), "", name, place))
        return out

    def full(self, file: Path, parameter: str) -> str:
        """The name of a parameter, with that of its folder where it is in a further one: several
        models may use the same names."""
        return parameter if file == self.saved.path else f"{file.parent.name}.{parameter}"

    def weights(self) -> Iterator[Weight]:
        """See `weights`."""
        return weights.weights(self.saved)

    def check(
        self,
        name: str,
        places: Sequence[Place],
        problem: Callable[[str, Any], str] = problem,
    ) -> None:
        """As `Checkpoint` does, with the file and the name that `.metadata` has for a value."""
        super().check(name, [p for p in places if p.file not in self.folders], problem)
        for place in (place for place in places if place.file in self.folders):
            if reason := problem(name, place.value):
                raise self.refused(name, place, reason)

    def render(
        self, changes: Mapping[str, Sequence[Change]], root: Path
    ) -> dict[str, Append | Content]:
        """Of each folder all values in one new file, and `.metadata`; the torch files beside them
        as ever."""
        rest, out = dict(changes), dict[str, Append | Content]()
        for path, saved in self.folders.items():
            metadata = path.relative_to(root).as_posix()
            if mine := rest.pop(metadata, ()):
                base = saved.folder.relative_to(root).as_posix()
                name = saved.next_file()
                out[f"{base}/{name}"], out[metadata] = saved.render(mine, base, name)
        return {**out, **super().render(rest, root)}

    def blobs(self) -> Iterator[Blob]:
        """See `blobs`."""
        return (blob for saved in self.folders.values() for blob in blobs(saved))

    def globals(self) -> dict[str, frozenset[str]]:
        """By file, every `module.name` that a load imports; tensors are loaded as such only."""
        files = {path: self.archives[path].globals() for path in self.archives}
        for saved in self.folders.values():
            files[saved.path] = saved.globals
            for items in saved.items.values():
                if not items.is_tensor:
                    path = saved.folder / items[0].file
                    names = saved.archive(items[0]).globals()
                    files[path] = files.get(path, frozenset()) | names
        return {f"{path.parent.name}/{path.name}": names for path, names in files.items()}


def placed(file: Path, path: tuple[Key, ...], value: Any, wins: bool = True) -> Place:
    """The place of a value or a tensor, which counts its chunks."""
    return Place(file, path, value, wins, chunks=len(value) if isinstance(value, Whole) else 1)


def blobs(saved: Saved) -> Iterator[Blob]:
    """Each item's bytes once: the zeros of a reset are shared."""
    shared = set[tuple[str, int]]()
    for name, items in saved.items.items():
        what = None if ".bucket_idx_" in name else kind(name)
        for item in items:
            if item.transforms or (item.file, item.start) in shared:
                continue
            if NEW.fullmatch(item.file):
                shared.add((item.file, item.start))
            yield Blob(saved.folder / item.file, item.start, item.length, what)


def kind(name: str) -> str:
    """The moment that a tensor of this name is of, or nothing."""
    parts = name.split(".")
    return next((moment for moment in MOMENTS if moment in parts), "")


def absent(folder: Path) -> list[str]:
    """The files that `.metadata` names and that are not there, or too short. Raises DamagedFile."""
    try:
        status = (folder / METADATA).stat()
    except FileNotFoundError:
        return [METADATA]
    out = []
    for file, end in _ends(folder, (status.st_ino, status.st_size, status.st_mtime_ns)):
        try:
            size = (folder / file).stat().st_size
        except FileNotFoundError:
            out.append(file)
            continue
        if size < end:
            out.append(f"{file} (cut short: {size} of {count(end, 'byte')})")
    return out


@lru_cache(maxsize=4096)
def _ends(folder: Path, identity: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """How far the values reach in each file: `.metadata` is parsed once while it is the same, as
    every command asks for every step."""
    table = Saved.open(folder).table
    return tuple(sorted(zip(table.files, table.ends, strict=True)))
