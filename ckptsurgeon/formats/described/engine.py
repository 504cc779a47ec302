"""One saved step of a described trainer that an engine of DeepSpeed wrote."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsurgeon.formats.deepspeed.engine import EngineCheckpoint
from ckptsurgeon.formats.described import savers
from ckptsurgeon.formats.values import Located, Setting


@dataclass
class DescribedEngine(EngineCheckpoint):
    """`savers` are (file, key path), in the client state."""

    savers: tuple[Located, ...] = ()

    def forget(
        self, gone: Collection[Path], resumed: Sequence[Path]
    ) -> tuple[list[Setting], list[str]]:
        """See `savers`."""
        return savers.forget(self, self.savers, gone, resumed)
