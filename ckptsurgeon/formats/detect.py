"""Which format a run has: every format by its module and class, asked one after the other."""

from __future__ import annotations

import importlib
from pathlib import Path

from ckptsurgeon.formats.protocol import Format

FORMATS = (
    "ckptsurgeon.formats.deepspeed.layout:DeepSpeed",
    "ckptsurgeon.formats.megatron.layout:Megatron",
    "ckptsurgeon.formats.dcp.layout:Torchtitan",
    "ckptsurgeon.formats.dcp.layout:OlmoCore",
    "ckptsurgeon.formats.plain.fairseq:Fairseq",
    "ckptsurgeon.formats.huggingface.layout:Transformers",
    "ckptsurgeon.formats.huggingface.layout:Accelerate",
    "ckptsurgeon.formats.plain.nanotron:Nanotron",
)
"""`module:Class` of each format, those that are told apart by more first. They are imported when
they are asked: most commands need one."""
SIGNS = "no global_step<N>, iter_<N> or step-<N> folder, no latest"
"""What most runs would have had, for one that no format recognizes."""


def detect(run: Path) -> Format | None:
    """The format of the run rooted at `run`, or None."""
    for name in FORMATS:
        module, _, cls = name.partition(":")
        item: Format = getattr(importlib.import_module(module), cls)()
        if item.recognizes(run):
            return item
    return None
