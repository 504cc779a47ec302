"""One saved step of a described trainer that an engine of DeepSpeed wrote."""

from __future__ import annotations

from dataclasses import dataclass

from ckptsurgeon.formats.deepspeed.engine import EngineCheckpoint
from ckptsurgeon.formats.described.savers import Saving
from ckptsurgeon.formats.fields.values import Located


@dataclass
class DescribedEngine(Saving, EngineCheckpoint):
    """`savers` are (file, key path), in the client state."""

    savers: tuple[Located, ...] = ()

    @property
    def asked(self) -> bool:
        """By its page, which has doubts otherwise."""
        return not self.doubts
