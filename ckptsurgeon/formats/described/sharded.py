"""One saved step of a described trainer that torch.distributed.checkpoint wrote."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.scheduled import ScheduledCheckpoint
from ckptsurgeon.formats.described import savers
from ckptsurgeon.formats.described.description import COUNTERS, Description, KeyPath
from ckptsurgeon.formats.values import Located, Place, Setting, Weight


@dataclass
class DescribedSharded(ScheduledCheckpoint):
    """`counted_at` are (file, key path) of each counter, `weights_in` how the names of weights
    begin, `savers` (file, key path)."""

    description: Description | None = None
    counted_at: Mapping[str, tuple[Located, ...]] | None = None
    weights_in: tuple[str, ...] = ()
    savers: tuple[Located, ...] = ()

    counters: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(COUNTERS, ())

    @property
    def numbered(self) -> bool:
        """Of several optimizers each update counts as a step."""
        return len(self.optimizers) == 1

    def counted(self, field: str) -> list[Place]:
        """What the page names."""
        places = []
        for file, path in (self.counted_at or {}).get(field, ()):
            here = file == self.saved.path
            places += self.scalar(str(path[0])) if here else self.at(file, path)
        return places

    def forget(
        self, gone: Collection[Path], resumed: Sequence[Path]
    ) -> tuple[list[Setting], list[str]]:
        """See `savers`."""
        return savers.forget(self, self.savers, gone, resumed)

    def notes(self) -> list[str]:
        """Whether a loader was asked."""
        page = self.description
        return [*super().notes(), *(page.doubts() if page is not None else ())]

    def named_weights(self) -> Iterator[tuple[Saved, str, str]]:
        """Where the page says: they go by their names without what it says there."""
        for inside in self.weights_in:
            for name in self.saved.items:
                if name.startswith(f"{inside}."):
                    yield self.saved, name, name.removeprefix(f"{inside}.")

    def weights(self) -> Iterator[Weight]:
        """Where the page says. Raises SurgeryError where it names none."""
        if not self.weights_in:
            raise SurgeryError(
                f"how the weights of {self.path.name} are named is not in its description",
                next="use the trainer's own conversion tool",
            )
        for inside in self.weights_in:
            yield from weights.weights(self.saved, f"{inside}.")


def beginnings(saved: Saved, path: KeyPath, rest: str = r"\..+") -> list[str]:
    """How the names begin that `path` leads to, `*` in a key filled in: `rest` must follow."""
    keys = [re.escape(str(key)).replace(r"\*", "[^.]*") for key in path]
    pattern = re.compile("(" + r"\.".join(keys) + ")" + rest)
    found = (pattern.fullmatch(name) for name in saved.items)
    return list(dict.fromkeys(match[1] for match in found if match))


def optimizers(saved: Saved, paths: tuple[KeyPath, ...]) -> list[str]:
    """How the names of each optimizer begin; what a page names, where none is there."""
    rest = r"\.(?:state|param_groups)\..+"
    found = [name for path in paths for name in beginnings(saved, path, rest)]
    return [f"{name}." for name in found or [".".join(map(str, paths[0] if paths else ()))]]
