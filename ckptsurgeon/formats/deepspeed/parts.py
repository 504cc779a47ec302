"""Which bytes are whose: weights, fp32 masters and moments of each parameter in a DeepSpeed step.

ZeRO 1 to 3 name what lies in their flat partitions, which hold a parameter's elements rank after
rank. Stage 0 keeps weights by name and, in fp32, no masters; it numbers its moments.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats import optimizer_state
from ckptsurgeon.formats.deepspeed import fragments
from ckptsurgeon.formats.deepspeed.optimizer import OPTIM, Optimizer
from ckptsurgeon.formats.deepspeed.parallel import LAYER, sizes
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.deepspeed.weights import EXPERT
from ckptsurgeon.formats.values import MOMENTS, Fragment, Part, Place

MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
TIED = "tied_modules."
RANK = re.compile(r"mp_rank_(\d+)")


def parts(checkpoint: DeepSpeedShards) -> list[Part]:
    """Every stretch of every parameter. Raises SurgeryError where it is not known whose it is."""
    refuse_universal(checkpoint)
    if any(EXPERT.fullmatch(path.name) for path in checkpoint.path.iterdir()):
        raise SurgeryError(
            f"{checkpoint.path.name} has experts, whose partitions are cut over fewer ranks",
            next="only operations on moments as a whole work here: reset, graft",
        )
    if not checkpoint.sharded:
        return list(_whole(checkpoint))
    tensor = sizes(next(iter(checkpoint.models().values()))).tensor or 1
    out = list(_flat(checkpoint, tensor))
    if checkpoint.stage() < 3:
        out += list(_with_masters(checkpoint, tensor, {part.parameter for part in out}))
    return out


def refuse_universal(checkpoint: DeepSpeedShards) -> None:
    """Raise SurgeryError where a copy would keep the numbers from before."""
    if any(item.universal for item in checkpoint.all_optimizers()):
        raise SurgeryError(
            "the universal copy of this step keeps weights and moments by whole parameters",
            next="move the copy out of the run, and convert the step again afterwards",
        )


def _with_masters(
    checkpoint: DeepSpeedShards, tensor: int, masters: Collection[str]
) -> Iterator[Part]:
    """The weights under the names of their masters: of what modules share, one name has them.
    Raises SurgeryError for weights without a master that are neither buffers nor frozen."""
    tied = {name.split(".", 2)[2]: name for name in masters if name.startswith(TIED)}
    shared: dict[str, str] = {}
    still: set[str] = set()
    for tree in checkpoint.models().values():
        shared |= {str(k): str(v) for k, v in dict(tree.get("shared_params") or {}).items()}
        still |= {*(tree.get("buffer_names") or ()), *(tree.get("frozen_param_shapes") or ())}
    for part in _weights(checkpoint, tensor):
        inside = part.parameter.partition(".")[2]
        names = (part.parameter, shared.get(part.parameter, ""), tied.get(inside, ""))
        name = next((name for name in names if name in masters), None)
        if name is not None:
            yield part._replace(parameter=name)
        elif part.parameter not in still:
            raise SurgeryError(
                f"{part.parameter} has weights in {part.place.file.name} and no fp32 master in any "
                "shard",
                next="ckptsurgeon verify --level 3    list what contradicts itself",
            )


def _weights(checkpoint: DeepSpeedShards, tensor: int) -> Iterator[Part]:
    """In the layer files of a pipeline, else in the model files; a cut is a tensor rank."""
    layers = [path for path in sorted(checkpoint.path.iterdir()) if LAYER.fullmatch(path.name)]
    checkpoint.read(layers)
    for path in layers:
        match = LAYER.fullmatch(path.name)
        if match is not None:
            prefix, cut = f"{int(match[1])}.", int(match[2] or 0)
            for name, value in checkpoint.trees[path].items():
                if isinstance(value, Tensor):
                    place = Place(path, (name,), value)
                    yield Part(prefix + name, str(cut), "weights", place, 0, value.numel, 0)
    for path, tree in checkpoint.models().items() if not layers else ():
        for name, value in (tree.get("module") or {}).items():
            if isinstance(value, Tensor):
                place = Place(path, ("module", name), value)
                cut = _rank(path.name) % tensor
                yield Part(name, str(cut), "weights", place, 0, value.numel, 0)


def _flat(checkpoint: DeepSpeedShards, tensor: int) -> Iterator[Part]:
    """Masters and moments in the partitions of ZeRO, data rank after data rank."""
    before: dict[tuple[str, str, str], int] = {}
    for item in sorted(checkpoint.optimizers(), key=lambda item: _data_rank(item)):
        stage, cut = divmod(_rank(item.file.name), tensor)
        outer = get(checkpoint.trees[item.file], item.outer)
        key = next((name for name in MASTERS if name in outer), None)
        if item.elastic or key is None:
            raise SurgeryError(
                f"{item.file.name} does not say where its masters are",
                next="save the step once without elastic checkpoints",
            )
        for kind in ("master", *MOMENTS):
            places = (
                [Place(item.file, (*item.outer, key, i), flat) for i, flat in enumerate(outer[key])]
                if kind == "master"
                else [p for p in checkpoint.locate(kind) if p.file == item.file]
            )
            for name, place, start, end in _fragments(checkpoint, item, places):
                # Each pipeline stage has a copy of what it ties; the weights are the first one's.
                where = f"{cut} of stage {stage}" if stage and name.startswith(TIED) else str(cut)
                first = before.get((name, where, kind), 0)
                before[name, where, kind] = first + end - start
                if start < end:
                    yield Part(name, where, kind, place, start, end, first)


def _fragments(
    checkpoint: DeepSpeedShards, item: Optimizer, places: list[Place]
) -> Iterator[Fragment]:
    outer = get(checkpoint.trees[item.file], item.outer)
    mappings = outer.get("param_slice_mappings")
    if isinstance(mappings, (list, tuple)) and len(mappings) == len(places):
        for mapping, place in zip(mappings, places, strict=True):
            yield from fragments.written_down(mapping, place)
    elif places:
        yield from fragments.computed(checkpoint, item, places)


def _whole(checkpoint: DeepSpeedShards) -> Iterator[Part]:
    """Stage 0: the weights by name, and the moments by number, as no name is saved with them."""
    for item in checkpoint.optimizers():
        outer = get(checkpoint.trees[item.file], item.outer)
        if any("fp32" in str(key) for key in outer):
            raise SurgeryError(
                f"{item.file.name} keeps fp32 masters without the names of their parameters",
                next="train with ZeRO 1, which names them, then edit its checkpoints",
            )
    yield from _weights(checkpoint, sizes(next(iter(checkpoint.models().values()))).tensor or 1)
    for item in checkpoint.optimizers():
        states = optimizer_state.states(checkpoint, item.file, item.base)
        for path, state in states:
            for kind in MOMENTS:
                value = state.get(kind)
                if isinstance(value, Tensor):
                    place = Place(item.file, (*path, kind), value)
                    yield Part(f"number {path[-1]}", item.file.name, kind, place, 0, value.numel, 0)


def _data_rank(item: Optimizer) -> tuple[int, int]:
    match = OPTIM.fullmatch(item.file.name)
    return (int(match["mp"]), int(match["dp"])) if match else (0, 0)


def _rank(name: str) -> int:
    match = RANK.search(name)
    return int(match[1]) if match else 0
