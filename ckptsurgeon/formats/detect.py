"""Which format a run has: every format by its module and class, asked one after the other."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from ckptsurgeon.errors import UsageError
from ckptsurgeon.formats.protocol import Format

FORMATS = (
    "ckptsurgeon.formats.deepspeed.layout:DeepSpeed",
    "ckptsurgeon.formats.megatron.layout:MegatronBridge",
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
DESCRIBED = (
    "lightning", "lightning-sharded", "lightning-deepspeed", "nemo", "composer", "composer-sharded",
    "automodel", "verl",
)  # fmt: skip
"""Pages in `described/`, asked after all of these."""
PAGED = re.compile(r".*\.(?:ckpt|pt)|ep(?:och_)?\d.*|global_step_\d+|.*step=\d+.*|.*-last")
"""What a run of one of those pages has in its folder."""
SIGNS = "no global_step<N>, iter_<N> or step-<N> folder, no latest"
"""What most runs would have had, for one that no format recognizes."""


def detect(run: Path) -> Format | None:
    """The format of the run rooted at `run`, or None. Raises UsageError where two pages describe
    it."""
    for name in FORMATS:
        module, _, cls = name.partition(":")
        item: Format = getattr(importlib.import_module(module), cls)()
        if item.recognizes(run):
            return item
    if not any(PAGED.fullmatch(path.name) for path in _listed(run)):
        return None  # no page describes other files, and to read one costs more than to look
    found = [page for page in _pages() if page.recognizes(run)]
    if len(found) > 1:
        names = " and ".join(page.name for page in found)
        raise UsageError(
            f"{run} looks like a run of {names}",
            next=[f"ckptsurgeon status --format {page.name}" for page in found],
        )
    return found[0] if found else None


def named(name: str) -> Format:
    """The format that `--format` names: one of a page here, a page of the user's own, or
    `torch:PATH=KEYS`. Raises UsageError."""
    from ckptsurgeon.formats.described import pages

    return pages.named(name, DESCRIBED)


def _pages() -> Iterator[Format]:
    from ckptsurgeon.formats.described import pages

    return (pages.shipped(name) for name in DESCRIBED)


def _listed(run: Path) -> list[Path]:
    try:
        return list(run.iterdir())
    except OSError:
        return []
