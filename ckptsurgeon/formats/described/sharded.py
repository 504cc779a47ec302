"""One saved step of a described trainer that torch.distributed.checkpoint wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.safetensors import SafetensorsFile
from ckptsurgeon.files.dcp import METADATA, Saved
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.scheduled import ScheduledCheckpoint
from ckptsurgeon.formats.described.anew import Anew
from ckptsurgeon.formats.described.description import COUNTERS, Description, KeyPath
from ckptsurgeon.formats.described.savers import Saving
from ckptsurgeon.formats.fields.values import COUNTING, Located, Part, Place, Weight
from ckptsurgeon.formats.places.json_beside import JsonBeside
from ckptsurgeon.formats.places.safetensors_beside import SafetensorsBeside

SHARDS = "shard-*.safetensors"
"""What torch's writer calls safetensors that hold what a rank has of each tensor."""


@dataclass
class DescribedSharded(Anew, Saving, SafetensorsBeside, JsonBeside, ScheduledCheckpoint):
    """`counted_at` are (file, key path) of each counter, `savers` (file, key path). `weights_in`
    say how the names of weights begin in the folder, in one of `models`, or in a file of SHARDS."""

    description: Description | None = None
    counted_at: Mapping[str, tuple[Located, ...]] | None = None
    weights_in: tuple[tuple[Saved | Path, str], ...] = ()
    savers: tuple[Located, ...] = ()

    counters: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(COUNTERS, ())

    @property
    def asked(self) -> bool:
        """By its page."""
        return self.description is None or bool(self.description.witness)

    @property
    def numbered(self) -> bool:
        """Of several optimizers each update counts as a step; names may count epochs."""
        return len(self.optimizers) == 1 and not self.outrun()

    def counted(self, field: str) -> list[Place]:
        """What the page names."""
        places = []
        for file, path in (self.counted_at or {}).get(field, ()):
            here = file == self.saved.path
            places += self.scalar(str(path[0])) if here else self.at(file, path)
        return places

    def notes(self) -> list[str]:
        """Whether a loader was asked."""
        page = self.description
        doubts = page.doubts() if page is not None else ()
        return [*super().notes(), *self.on_anew(), *doubts]

    def wins(self, field: str) -> bool:
        """Nothing of what the trainer makes itself."""
        return not self.is_anew(field)

    def next_rate(self) -> float | None:
        """Not known where the trainer makes it itself."""
        return None if self.is_anew("lr") else super().next_rate()

    def named_weights(self) -> Iterator[tuple[Saved, str, str]]:
        """Where the page says: they go by their names without what it says there."""
        for saved, inside in self.weights_in:
            if isinstance(saved, Saved):
                mine = (name for name in saved.items if name.startswith(inside))
                yield from ((saved, name, name.removeprefix(inside)) for name in mine)

    def parts(self) -> list[Part]:
        """Also of safetensors, cut as torch's writer says."""
        out = super().parts()
        for file, inside in self.weights_in:
            if isinstance(file, Saved):
                continue
            tensors, archive = self.tensors(file), self.archives[file]
            offsets = archive.offsets if isinstance(archive, SafetensorsFile) else {}
            for name, place in tensors.items():
                if name.startswith(inside) and place.value.dtype not in COUNTING:
                    cut = ".".join(map(str, offsets.get(name, ())))
                    out.append(Part.whole(name.removeprefix(inside), cut, "weights", place))
        return out

    def weights(self) -> Iterator[Weight]:
        """Where the page says. Raises SurgeryError where it names none, and for shards of
        safetensors."""
        if not self.weights_in:
            raise SurgeryError(
                f"the description of {self.path.name} does not say how its weights are named",
                next="use the trainer's own conversion tool",
            )
        for saved, inside in self.weights_in:
            if not isinstance(saved, Saved):
                raise SurgeryError(
                    f"the weights of {self.path.name} are in shards of safetensors, such as "
                    f"{saved.name}",
                    next="join them with the trainer's own consolidation tool",
                )
            yield from weights.weights(saved, inside)


def beginnings(names: Iterable[str], path: KeyPath, rest: str = r"\..+") -> list[str]:
    """How the `names` begin that `path` leads to, `*` in a key filled in: `rest` must follow."""
    keys = [re.escape(str(key)).replace(r"\*", "[^.]*") for key in path]
    pattern = re.compile("(" + r"\.".join(keys) + ")" + rest)
    found = (pattern.fullmatch(name) for name in names)
    return list(dict.fromkeys(match[1] for match in found if match))


def begun(folder: Path) -> bool:
    """Whether weights were saved into `folder`, to their end or not."""
    return disk.is_file(folder / METADATA) or any(
        any(disk.matching(folder, names)) for names in (SHARDS, "*.distcp")
    )


def weights_of(folder: Path, paths: Iterable[KeyPath]) -> list[tuple[Saved | Path, str]]:
    """Where the weights in `folder` are, and how their names begin there. A load that finds both
    forms takes safetensors."""
    sources: list[Saved | Path] = [*disk.matching(folder, SHARDS)] or [Saved.open(folder)]
    return [(each, inside) for each in sources for keys in paths for inside in _insides(each, keys)]


def _insides(source: Saved | Path, keys: KeyPath) -> list[str]:
    if not keys:
        return [""]
    names = source.items if isinstance(source, Saved) else SafetensorsFile.open(source).tree()
    return [f"{name}." for name in beginnings(names, keys)]


def optimizers(saved: Saved, paths: tuple[KeyPath, ...]) -> list[str]:
    """How the names of each optimizer begin; what a page names, where none is there."""
    rest = r"\.(?:state|param_groups)\..+"
    found = [name for path in paths for name in beginnings(saved.items, path, rest)]
    return [f"{name}." for name in found or [".".join(map(str, paths[0] if paths else ()))]]
