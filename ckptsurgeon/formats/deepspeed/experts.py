"""Experts in a DeepSpeed step: each rank counts its own from 0, and the files count all.

DeepSpeed's own layers of experts are meant. Without ZeRO, an optimizer numbers what its rank has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.deepspeed.optimizer import EXPERTS, Optimizer
from ckptsurgeon.formats.deepspeed.parallel import EXPERT, LAYER, model_rank, tensor_ranks
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.places import optimizer_state

NAME = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")
RANKS = re.compile(r"ep_size_(\d+)")
"""The name of a param group of experts: over how many ranks they are spread."""


def files(checkpoint: DeepSpeedShards) -> list[Path]:
    """Those that have the weights of one expert each."""
    return [path for path in sorted(checkpoint.folder.iterdir()) if EXPERT.fullmatch(path.name)]


def are_known(checkpoint: DeepSpeedShards) -> bool:
    """Whether param groups say over how many ranks theirs are spread, and these follow each other
    (`deepspeed/utils/groups.py`); a pipeline that saves layer files has other names in them."""
    layers = any(LAYER.fullmatch(path.name) for path in checkpoint.folder.iterdir())
    apart = checkpoint.config().get("use_data_before_expert_parallelism")
    if layers or apart or checkpoint.stage() == 3:
        return False
    return not checkpoint.sharded or all(
        None not in spread(checkpoint, item) for item in checkpoint.optimizers()
    )


def counts(checkpoint: DeepSpeedShards) -> dict[str, int]:
    """How the names of the experts of a layer begin → how many there are."""
    numbers: dict[str, set[str]] = {}
    if are_known(checkpoint):
        checkpoint.read(files(checkpoint))
        for name in (str(name) for path in files(checkpoint) for name in checkpoint.trees[path]):
            if match := NAME.fullmatch(name):
                numbers.setdefault(match[1], set()).add(match[2])
    return {name: len(found) for name, found in numbers.items()}


def spread(checkpoint: DeepSpeedShards, item: Optimizer) -> list[int | None]:
    """Of each param group, over how many ranks its experts are spread: 0 if it has none, None if
    it does not say."""
    if item.elastic:
        return []
    out: list[int | None] = []
    for group in optimizer_state.param_groups(checkpoint, item.file, item.base):
        match = RANKS.search(str(group.get("name", "")))
        out.append((int(match[1]) if match else None) if group.get("moe") else 0)
    return out


def of_all(name: str, counted: Mapping[str, int], rank: int, ranks: int) -> str:
    """What a parameter of one rank's experts is called in the files of all experts."""
    match = NAME.fullmatch(name)
    if match is None or match[1] not in counted:
        return name
    first = rank % ranks * (counted[match[1]] // ranks)
    return f"{match[1]}{first + int(match[2])}{match[3]}"


def names_in(checkpoint: DeepSpeedShards, file: Path, order: Sequence[str]) -> list[str]:
    """The names of what the optimizer in `file` numbers. The order has those of all pipeline
    stages, one after another; of experts, those of all ranks or, as each rank calls its own, of
    one. Raises SurgeryError where it is not known which ranks have which experts."""
    if checkpoint.sharded:
        return list(order)
    items = checkpoint.optimizers()
    (own,) = (item for item in items if item.file == file)
    tensor = tensor_ranks(checkpoint.models())
    stage, cut = divmod(model_rank(file.name), tensor)
    names, first = _of_rank(checkpoint, own, order), 0
    for item in items:
        earlier, other = divmod(model_rank(item.file.name), tensor)
        alike = (other, _rank(item), item.loaded) == (cut, _rank(own), own.loaded)
        if alike and earlier < stage:
            first += _length(checkpoint, item)
    return names[first : first + _length(checkpoint, own)]


def _of_rank(checkpoint: DeepSpeedShards, item: Optimizer, order: Sequence[str]) -> list[str]:
    """The names without the experts of other ranks."""
    spreads = {ranks for ranks in spread(checkpoint, item) if ranks != 0}
    if not spreads:
        return list(order)
    ranks = next(iter(spreads))
    if len(spreads) > 1 or ranks is None:
        raise SurgeryError(
            f"{item.file.name} numbers the states of experts, and does not say which it has",
            next="train with ZeRO 1, which names them, then transplant its steps",
        )
    counted, rank, out = counts(checkpoint), _rank(item) % ranks, []
    found = [NAME.fullmatch(name) for name in order]
    last = {match[1]: int(match[2]) for match in found if match}
    for match in found:
        if match:
            last[match[1]] = max(last[match[1]], int(match[2]))
    for name, match in zip(order, found, strict=True):
        own = counted.get(match[1], 0) // ranks if match else 0
        if match is None or not own:
            out.append(name)
        elif last[match[1]] < own:  # as each rank calls them
            out.append(of_all(name, counted, rank, ranks))
        elif int(match[2]) // own == rank:
            out.append(name)
    return out


def _rank(item: Optimizer) -> int:
    """Among those that share the experts."""
    match = EXPERTS.fullmatch(item.file.name)
    return int(match["ep"]) if match else 0


def _length(checkpoint: DeepSpeedShards, item: Optimizer) -> int:
    groups = optimizer_state.param_groups(checkpoint, item.file, item.base)
    return sum(len(group.get("params", ())) for group in groups)
