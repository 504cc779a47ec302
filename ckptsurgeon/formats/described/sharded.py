"""One saved step of a described trainer that torch.distributed.checkpoint wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.formats.dcp import weights
from ckptsurgeon.formats.dcp.scheduled import ScheduledCheckpoint
from ckptsurgeon.formats.described.description import COUNTERS, Description, KeyPath
from ckptsurgeon.formats.values import Located, Place, Weight


@dataclass
class DescribedSharded(ScheduledCheckpoint):
    """`counted_at` are (file, key path) of each counter, `weights_in` how the names of weights
    begin."""

    description: Description | None = None
    counted_at: Mapping[str, tuple[Located, ...]] | None = None
    weights_in: tuple[str, ...] = ()

    counters: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(COUNTERS, ())

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


def optimizer(saved: Saved, paths: tuple[KeyPath, ...]) -> str:
    """How the names of the one optimizer begin. Raises SurgeryError for several."""
    rest = r"\.(?:state|param_groups)\..+"
    found = [name for path in paths for name in beginnings(saved, path, rest)]
    if len(found) > 1:
        raise SurgeryError(
            f"{saved.folder.name} holds several optimizers ({', '.join(found)}), and only one is "
            "known in shards",
            next="set what you want where the script makes its optimizers",
        )
    return f"{found[0]}." if found else ".".join(map(str, paths[0] if paths else ())) + "."
