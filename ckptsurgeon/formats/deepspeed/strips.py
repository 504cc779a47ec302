"""Moments, fp32 masters and weights of each parameter of a DeepSpeed step, side by side.

A ZeRO shard has flat tensors, of which each parameter's part is known (`fragments`). The parts of
one parameter lie in its weights in the order of the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.edits import Key
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats import strips as of_states
from ckptsurgeon.formats.deepspeed import fragments, optimizer
from ckptsurgeon.formats.deepspeed.optimizer import OPTIM, Optimizer
from ckptsurgeon.formats.deepspeed.parallel import LAYER, sizes
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.optimizers.adam import is_adam
from ckptsurgeon.formats.values import MOMENTS, Adam, Fragment, Place, Strip

FLATS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
"""The masters of ZeRO 1 and 2, and of ZeRO 3."""

Part = tuple[str, int, int, Mapping[str, Place], Adam]
"""A parameter, the first and the last of its elements in flat tensors, and those."""


def strips(checkpoint: DeepSpeedShards) -> Iterator[Strip]:
    """Of the shards by parameter where they say so; of stage 0 and of a universal copy by state."""
    sharded = [item for item in checkpoint.optimizers() if _is_flat(checkpoint, item)]
    if not sharded:
        yield from _universal_or_plain(checkpoint)
        return
    weights = _weights(checkpoint)
    begun: dict[tuple[int, str], int] = {}
    parts = [
        (_model_rank(item), part)
        for item in sorted(sharded, key=_data_rank)
        for part in _parts(checkpoint, item)
    ]
    whole: dict[tuple[int, str], int] = {}
    for rank, (name, start, end, _, _) in parts:
        whole[rank, name] = whole.get((rank, name), 0) + end - start
    for rank, (name, start, end, flats, adam) in parts:
        at = begun.get((rank, name), 0)
        begun[rank, name] = at + end - start
        tensors = {kind: (place, start) for kind, place in flats.items()}
        weight = weights.get((rank, name))
        shape = None
        if weight is not None and weight.value.numel == whole[rank, name]:
            tensors["weights"] = (weight, at)
            shape = weight.value.size if weight.value.numel == end - start else None
        yield Strip(name, end - start, tensors, adam, shape=shape)


def _universal_or_plain(checkpoint: DeepSpeedShards) -> Iterator[Strip]:
    weights = {name: place for (rank, name), place in _weights(checkpoint).items() if rank == 0}
    for strip in of_states.strips(checkpoint):
        first = next((place for place, _ in strip.tensors.values()), None)
        if first is None or first.file.parent.parent.name != "zero":
            yield strip
            continue
        name = first.file.parent.name
        tensors = dict(strip.tensors)
        master = _universal_master(checkpoint, first.file.with_name("fp32.pt"))
        if master is not None and master.value.numel == strip.numel:
            tensors["master"] = (master, 0)
            weight = weights.get(name)
            if weight is not None and weight.value.numel == strip.numel:
                tensors["weights"] = (weight, 0)
        yield strip._replace(parameter=name, tensors=tensors)


def _universal_master(checkpoint: DeepSpeedShards, file: Path) -> Place | None:
    if not file.is_file():
        return None
    checkpoint.read([file])
    tree = checkpoint.trees[file]
    path: tuple[Key, ...] = () if isinstance(tree, Tensor) else ("param",)
    tensor = tree if isinstance(tree, Tensor) else tree.get("param")
    ready = isinstance(tensor, Tensor) and of_states.contiguous(tensor)
    return Place(file, path, tensor) if ready else None


def _is_flat(checkpoint: DeepSpeedShards, item: Optimizer) -> bool:
    outer = get(checkpoint.trees[item.file], item.outer)
    return not item.universal and any(isinstance(outer.get(key), (list, tuple)) for key in FLATS)


def _parts(checkpoint: DeepSpeedShards, item: Optimizer) -> Iterator[Part]:
    """Of one shard, in the order of its flat tensors."""
    outer = get(checkpoint.trees[item.file], item.outer)
    key = next(key for key in FLATS if isinstance(outer.get(key), (list, tuple)))
    saved = optimizer.saved(checkpoint, item)
    settings, lawful = of_states.Settings(checkpoint, saved), is_adam(saved)
    lines: list[tuple[int, dict[str, Place], Adam]] = []
    for i, (path, state) in enumerate(optimizer.states(checkpoint, item)):
        number = path[-1] if isinstance(path[-1], int) else i
        places = {
            str(kind): Place(item.file, (*path, kind), value) for kind, value in state.items()
        }
        flats = {kind: places[kind] for kind in MOMENTS if kind in places}
        if number < len(outer[key]):
            inside = (*item.outer, key, number)
            flats["master"] = Place(item.file, inside, outer[key][number])
        flats = {kind: place for kind, place in flats.items() if _is_line(place.value)}
        sizes = [place.value.numel for place in flats.values()]
        flats = {kind: place for kind, place in flats.items() if place.value.numel == sizes[0]}
        if flats:
            lines.append((number, flats, settings.adam(path, places, lawful)))
    firsts = {next(iter(flats.values())): (flats, adam) for _, flats, adam in lines}
    for name, place, start, end in _named(checkpoint, item, outer, lines):
        flats, adam = firsts[place]
        yield name, start, end, flats, adam


def _named(
    checkpoint: DeepSpeedShards,
    item: Optimizer,
    outer: Mapping[str, Any],
    lines: list[tuple[int, dict[str, Place], Adam]],
) -> Iterator[Fragment]:
    mappings = outer.get("param_slice_mappings")
    firsts = [(number, next(iter(flats.values()))) for number, flats, _ in lines]
    if isinstance(mappings, (list, tuple)):
        for number, place in firsts:
            mapping = mappings[number] if number < len(mappings) else {}
            for name, address in mapping.items():
                start = get(address, ("start",))
                yield Fragment(name, place, start, start + get(address, ("numel",)))
            if not mapping:
                yield Fragment(f"param group {number}", place, 0, place.value.numel)
        return
    try:
        yield from list(fragments.computed(checkpoint, item, [place for _, place in firsts]))
    except SurgeryError:
        for number, place in firsts:
            yield Fragment(f"param group {number}", place, 0, place.value.numel)


def _is_line(value: Any) -> bool:
    return isinstance(value, Tensor) and len(value.size) == 1 and of_states.contiguous(value)


def _weights(checkpoint: DeepSpeedShards) -> dict[tuple[int, str], Place]:
    """Model rank and name → the weights of that name, as the shards of the model have them."""
    out: dict[tuple[int, str], Place] = {}
    layers = [path for path in sorted(checkpoint.path.iterdir()) if LAYER.fullmatch(path.name)]
    if not layers:
        for rank, (path, tree) in enumerate(checkpoint.models().items()):
            if checkpoint.stage() != 3:
                _add(out, rank, path, ("module",), tree.get("module"), "")
        return out
    tensor = sizes(next(iter(checkpoint.models().values()))).tensor or 1
    ranks = {_model_rank(item) for item in checkpoint.optimizers()}
    checkpoint.read(layers)
    for path in layers:
        match = LAYER.fullmatch(path.name)
        assert match is not None
        prefix = f"{int(match[1])}."
        for rank in ranks:  # of every stage: a layer's names are those of one stage, or tied
            if rank % tensor == int(match[2] or 0):
                _add(out, rank, path, (), checkpoint.trees[path], prefix)
    return out


def _add(
    out: dict[tuple[int, str], Place],
    rank: int,
    file: Path,
    path: tuple[Key, ...],
    module: Any,
    prefix: str,
) -> None:
    for name, tensor in module.items() if isinstance(module, Mapping) else ():
        if isinstance(tensor, Tensor) and of_states.contiguous(tensor):
            out[rank, prefix + str(name)] = Place(file, (*path, name), tensor)


def _model_rank(item: Optimizer) -> int:
    match = OPTIM.fullmatch(item.file.name)
    return int(match["mp"]) if match else 0


def _data_rank(item: Optimizer) -> int:
    match = OPTIM.fullmatch(item.file.name)
    return int(match["dp"]) if match else 0
