"""Where one file of a DeepSpeed checkpoint keeps an optimizer: groups, moments, step, loss scaler.

Which place the loader reads was measured on real checkpoints (docs/formats.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.files.pickles.tree import get
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.deepspeed import universal
from ckptsurgeon.formats.fields.columns import Column, Places
from ckptsurgeon.formats.fields.understood import mapping, not_understood, understood
from ckptsurgeon.formats.fields.values import Place, StateDict
from ckptsurgeon.formats.optimizers.state_dict import by_key, state_dict
from ckptsurgeon.formats.places import optimizer_state
from ckptsurgeon.plans.edits import Key
from ckptsurgeon.plans.frozen import frozen

OPTIM = re.compile(
    r"(?P<dtype>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d{2,})_optim_states\.pt"
)
EXPERTS = re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d{2,})_optim_states\.pt")
"""A model with experts and without ZeRO: one whole optimizer for each expert-parallel rank."""


@frozen
class Optimizer:
    """Where one file keeps an optimizer: `base` leads to {state, param_groups}, `outer` to the dict
    with clip_grad and the loss scaler. `loaded` is false for a copy that no loader reads."""

    file: Path
    outer: tuple[Key, ...]
    base: tuple[Key, ...]
    elastic: bool = False
    loaded: bool = True
    universal: bool = False


def data_rank(item: Optimizer) -> tuple[int, int]:
    """The model rank and the data rank of a shard of ZeRO."""
    match = OPTIM.fullmatch(item.file.name)
    return (int(match["mp"]), int(match["dp"])) if match else (0, 0)


def optimizers(trees: Mapping[Path, Any], path: Path) -> Iterator[Optimizer]:
    """The optimizer in the file `path` of a checkpoint, if there is one."""
    tree = trees[path]
    if universal.is_state(path):
        base: tuple[Key, ...] = ("optimizer_state_dict",) if "optimizer_state_dict" in tree else ()
        yield Optimizer(path, (), base, universal=True)
    elif universal.is_of_a_parameter(path):
        return
    elif OPTIM.fullmatch(path.name):
        outer: tuple[Key, ...] = ("optimizer_state_dict",)
        state = tree["optimizer_state_dict"]
        if "base_optimizer_state" in mapping(state):  # ZeRO 1 and 2
            kept = state["base_optimizer_state"]
            elastic = isinstance(kept, (list, tuple)) and all(isinstance(s, Mapping) for s in kept)
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


def groups(
    checkpoint: Checkpoint, item: Optimizer, name: str, wins: bool = True
) -> Iterator[Place]:
    """`name` in each param group; an elastic checkpoint has none, and a universal copy of stage 3
    is loaded with the first one for all."""
    if item.elastic:
        return
    wins = wins and item.loaded
    for place in optimizer_state.groups(checkpoint, item.file, item.base, name, wins):
        shared = item.universal and item.base and place.path[-2] != 0
        yield place._replace(wins=False) if shared else place


def states(checkpoint: Checkpoint, item: Optimizer) -> optimizer_state.States:
    """Every state; an elastic checkpoint has them in a list."""
    if not item.elastic:
        return optimizer_state.states(checkpoint, item.file, item.base)
    entries = _kept(checkpoint, item)
    return optimizer_state.States(item.base, dict(enumerate(entries)))


def saved(checkpoint: Checkpoint, item: Optimizer) -> StateDict:
    """All that the file keeps of the optimizer, by key."""
    if item.universal:
        return universal.saved(checkpoint, item.file, item.base)
    if item.elastic:
        columns = by_key(item.file, *states(checkpoint, item))
        return StateDict(item.file, {key: Places(each) for key, each in columns.items()}, {})
    return state_dict(item.file, item.base, _kept(checkpoint, item))


def header(checkpoint: Checkpoint, item: Optimizer) -> StateDict:
    """The same, with one place of each key of the states."""
    if item.universal or item.elastic:
        return saved(checkpoint, item)
    return state_dict(item.file, item.base, _kept(checkpoint, item), bare=True)


def around(checkpoint: Checkpoint, item: Optimizer) -> Mapping[Key, Any]:
    """The dict at `outer`. Raises NotUnderstood for another thing in its place."""
    found = get(checkpoint.trees[item.file], item.outer)
    if not isinstance(found, Mapping):
        raise not_understood(item.file, item.outer, found, "what an engine saves there")
    return found


def _kept(checkpoint: Checkpoint, item: Optimizer) -> Any:
    """What the file has at `base`. Raises NotUnderstood where that leads nowhere."""
    with understood(item.file):
        return get(checkpoint.trees[item.file], item.base)


def moment(checkpoint: Checkpoint, item: Optimizer, name: str) -> Iterable[Column]:
    """Every tensor that makes up exp_avg or exp_avg_sq."""
    if item.universal:
        return map(Column.of, universal.moment(checkpoint, item.file, name))
    entries = states(checkpoint, item)
    return optimizer_state.moment(checkpoint, item.file, entries, name, item.loaded)


def steps(checkpoint: Checkpoint, item: Optimizer) -> list[Column]:
    """Adam's counter, wherever it is. FusedAdam leaves 0 in the groups: they count where nothing
    else does."""
    if item.universal:
        columns = [Column.of(place) for place in universal.steps(checkpoint, item.file)]
    else:
        beside = checkpoint.at(item.file, (*item.outer, "base_optimizer_state_step"))
        entries = states(checkpoint, item)
        columns = optimizer_state.steps(checkpoint, item.file, entries, beside, item.loaded)
    return [*columns, *map(Column.of, groups(checkpoint, item, "step", not columns))]


def scaler(checkpoint: Checkpoint, item: Optimizer, name: str) -> list[Place]:
    """An attribute of the loss scaler: an object under ZeRO, plain keys at stage 0."""
    inside = checkpoint.at(item.file, (*item.outer, "loss_scaler", name), item.loaded)
    return inside or checkpoint.at(item.file, (*item.outer, name), item.loaded)


def scaler_start(
    checkpoint: Checkpoint, item: Optimizer, power: int
) -> Iterator[tuple[Place, Any]]:
    """Each place of the loss scaler with its value in a new run: cur_scale = 2**power.

    `deepspeed/runtime/fp16/loss_scaler.py`: growth is counted from last_overflow_iter."""
    hysteresis = scaler(checkpoint, item, "delayed_shift")
    start = {"cur_scale": 2**power, "cur_iter": 0, "last_overflow_iter": -1}
    if hysteresis:
        start["cur_hysteresis"] = hysteresis[0].value
    for name, value in start.items():
        yield from ((place, value) for place in scaler(checkpoint, item, name))
