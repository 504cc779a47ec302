"""Where one file of a DeepSpeed checkpoint keeps an optimizer: groups, moments, step, loss scaler.

Which place the loader reads was measured on real checkpoints (docs/formats.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Key
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats import Place, moments
from ckptsurgeon.formats.checkpoint import Shards
from ckptsurgeon.formats.deepspeed import universal as deepspeed_universal

OPTIM = re.compile(
    r"(?P<dtype>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d{2,})_optim_states\.pt"
)
EXPERTS = re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d{2,})_optim_states\.pt")
"""A model with experts and without ZeRO: one whole optimizer for each expert-parallel rank."""


@dataclass(frozen=True)
class Optimizer:
    """Where one file keeps an optimizer: `base` leads to {state, param_groups}, `outer` to the dict
    with clip_grad and the loss scaler. `loaded` is false for a copy that no loader reads."""

    file: Path
    outer: tuple[Key, ...]
    base: tuple[Key, ...]
    elastic: bool = False
    loaded: bool = True
    universal: bool = False


def found(trees: Mapping[Path, Any], path: Path) -> Iterator[Optimizer]:
    """The optimizer in the file `path` of a checkpoint, if there is one."""
    tree = trees[path]
    if deepspeed_universal.is_state(path):
        base: tuple[Key, ...] = ("optimizer_state_dict",) if "optimizer_state_dict" in tree else ()
        yield Optimizer(path, (), base, universal=True)
    elif path.parent.parent.name == "zero":  # one parameter of a universal copy
        return
    elif OPTIM.fullmatch(path.name):
        outer: tuple[Key, ...] = ("optimizer_state_dict",)
        state = tree["optimizer_state_dict"]
        if "base_optimizer_state" in state:  # ZeRO 1 and 2
            elastic = not isinstance(state["base_optimizer_state"], dict)
            yield Optimizer(path, outer, (*outer, "base_optimizer_state"), elastic)
        else:  # ZeRO 3 repeats the key
            yield Optimizer(path, outer, (*outer, "optimizer_state_dict"))
    elif isinstance(tree.get("optimizer"), dict):  # stage 0
        outer = ("optimizer",)
        wrapped = "optimizer_state_dict" in tree["optimizer"]
        # With experts each rank loads the file of its expert-parallel rank instead.
        loaded = not any(EXPERTS.fullmatch(p.name) for p in trees) or "module" not in tree
        inner = (*outer, "optimizer_state_dict") if wrapped else outer
        yield Optimizer(path, outer, inner, loaded=loaded)


def groups(shards: Shards, item: Optimizer, name: str, wins: bool = True) -> Iterator[Place]:
    """`name` in each param group; an elastic checkpoint has none."""
    if item.elastic:
        return
    for i in range(len(get(shards.trees[item.file], (*item.base, "param_groups")))):
        path = (*item.base, "param_groups", i, name)
        first = i == 0 or not (item.universal and item.base)  # which stage 3 loads for all
        yield from shards.at(item.file, path, wins and item.loaded and first)


def states(shards: Shards, item: Optimizer) -> Iterator[tuple[tuple[Key, ...], dict[Key, Any]]]:
    """The path and content of each state: of a parameter, or of a flat group."""
    base = get(shards.trees[item.file], item.base)
    prefix = item.base if item.elastic else (*item.base, "state")
    for key, state in enumerate(base) if item.elastic else base["state"].items():
        yield (*prefix, key), state


def moment(shards: Shards, item: Optimizer, name: str) -> Iterator[Place]:
    """Every tensor that makes up exp_avg or exp_avg_sq."""
    if item.universal:
        yield from deepspeed_universal.moment(shards, item.file, name)
        return
    for path, state in states(shards, item):
        yield from moments.places(shards, item.file, path, state, name, item.loaded)


def steps(shards: Shards, item: Optimizer) -> Iterator[Place]:
    """Adam's counter. Of several in a file the largest is the real one: FusedAdam leaves 0 in the
    group and, at stage 0, in all but the last parameter's state."""
    if item.universal:
        places = list(deepspeed_universal.steps(shards, item.file))
        yield from places
        yield from groups(shards, item, "step", not places)
        return
    archive = shards.archives[item.file]
    held = [((*p, "step"), state["step"]) for p, state in states(shards, item) if "step" in state]
    with archive.reading():
        archive.fetch([value for _, value in held if isinstance(value, Tensor)])
        held = [(path, shards.plain(item.file, value)) for path, value in held]
    elastic = shards.at(item.file, (*item.outer, "base_optimizer_state_step"))
    held += [(place.path, place.value) for place in elastic]
    top = max((value for _, value in held), default=None)
    for path, value in held:
        yield Place(item.file, path, value, value == top and item.loaded)
    yield from groups(shards, item, "step", not held)


def scaler(shards: Shards, item: Optimizer, name: str) -> list[Place]:
    """An attribute of the loss scaler: an object under ZeRO, plain keys at stage 0."""
    inside = shards.at(item.file, (*item.outer, "loss_scaler", name), item.loaded)
    return inside or shards.at(item.file, (*item.outer, name), item.loaded)


def scaler_start(shards: Shards, item: Optimizer, power: int) -> Iterator[tuple[Place, Any]]:
    """Each place of the loss scaler with its value in a new run: cur_scale = 2**power.

    `deepspeed/runtime/fp16/loss_scaler.py`: growth is counted from last_overflow_iter."""
    hysteresis = scaler(shards, item, "delayed_shift")
    start = {"cur_scale": 2**power, "cur_iter": 0, "last_overflow_iter": -1}
    if hysteresis:
        start["cur_hysteresis"] = hysteresis[0].value
    for name, value in start.items():
        yield from ((place, value) for place in scaler(shards, item, name))
