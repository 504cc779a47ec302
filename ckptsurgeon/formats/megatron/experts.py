"""Experts in a legacy Megatron-LM step: each expert rank counts its own from 0.

Rank r of R has the r-th of R equal runs of them (`megatron/core/transformer/moe/moe_layer.py`), and
the rest of the model once more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

NUMBERED = re.compile(r"(.*\.local_experts\.|.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)(.*)")
"""One expert's: of a layer that has each as a module, or numbered weights."""
ANY = re.compile(r".*\.experts\.")
"""What else is an expert's is in one tensor for all of a rank."""


def ranks(args: Mapping[str, Any]) -> int:
    """Over how many the experts are spread."""
    return int(args.get("expert_model_parallel_size") or 1)


def tensor_ranks(args: Mapping[str, Any]) -> int:
    """Over how many each expert is cut: as the attention, unless they say otherwise."""
    name = "expert_tensor_parallel_size"
    return int(args.get(name) or args.get("tensor_model_parallel_size") or 1)


def shares(tensor: int, spread: int, cut: int) -> list[tuple[int, int]]:
    """The tensor and the expert rank of each file of a stage: not every pair where experts are cut
    over others than the attention is (`megatron/core/parallel_state.py`)."""
    processes = range(math.lcm(tensor, cut * spread))
    return sorted({_share(rank, tensor, spread, cut) for rank in processes})


def _share(process: int, tensor: int, spread: int, cut: int) -> tuple[int, int]:
    return process % tensor, process // cut % spread


def share_one_file(tensor: int, spread: int, cut: int) -> bool:
    """Whether ranks with other pieces of an expert have the same file: its name says the rank of
    the attention alone."""
    files: dict[tuple[int, int], set[int]] = {}
    for process in range(math.lcm(tensor, cut * spread)):
        files.setdefault(_share(process, tensor, spread, cut), set()).add(process % cut)
    return any(len(pieces) > 1 for pieces in files.values())


def first(folder: str, args: Mapping[str, Any], expert: bool) -> str:
    """The folder of the first of the ranks that have the same of experts, or of all else, as that
    of this one: there the distributed optimizer keeps its state (`ChainedOptimizer`). Of sizes
    whose ranks do not `share_one_file`."""
    tensor, spread = int(args.get("tensor_model_parallel_size") or 1), ranks(args)
    cut, words = tensor_ranks(args), folder.split("_")
    own, other = int(words[2]), int(words[-1]) if spread > 1 else 0
    process = own
    if expert:
        process = other * cut + _piece((own, other), tensor, spread, cut)
    of_tensor, of_experts = _share(process, tensor, spread, cut)
    words[2] = f"{of_tensor:02d}"
    words[-1:] = [f"{of_experts:03d}"] if spread > 1 else words[-1:]
    return "_".join(words)


@lru_cache(4096)
def _piece(share: tuple[int, int], tensor: int, spread: int, cut: int) -> int:
    """Which piece of each expert the ranks with this file have."""
    processes = range(math.lcm(tensor, cut * spread))
    return next((p % cut for p in processes if _share(p, tensor, spread, cut) == share), 0)


def rank(file: Path) -> int:
    """That of a file of several: its folder's last number."""
    return int(file.parent.name.rpartition("_")[2])


def of_all(names: Sequence[str], rank: int) -> dict[str, str]:
    """What those of a rank are called where all are counted."""
    found = {name: match for name in names if (match := NUMBERED.fullmatch(name))}
    counts: dict[tuple[str, str], int] = {}
    for match in found.values():
        counts[match[1], match[3]] = counts.get((match[1], match[3]), 0) + 1
    return {
        name: f"{match[1]}{rank * counts[match[1], match[3]] + int(match[2])}{match[3]}"
        for name, match in found.items()
    }


def are_cut(name: str) -> bool:
    """Whether it is a tensor with the experts of its rank, of which it is not known which they
    are."""
    return ANY.match(name) is not None and NUMBERED.fullmatch(name) is None
