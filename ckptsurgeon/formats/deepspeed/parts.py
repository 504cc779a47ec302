"""Which bytes are whose: weights, fp32 masters and moments of each parameter in a DeepSpeed step.

ZeRO 1 to 3 name what lies in their flat partitions, which hold a parameter's elements rank after
rank. Stage 0 keeps weights by name and, in fp32, no masters; it numbers its moments. A universal
copy has a folder for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.deepspeed import experts, fragments
from ckptsurgeon.formats.deepspeed.optimizer import Optimizer, around, data_rank
from ckptsurgeon.formats.deepspeed.parallel import (
    LAYER,
    TensorRank,
    box,
    is_gated,
    model_rank,
    tensor_ranks,
)
from ckptsurgeon.formats.deepspeed.shards import DeepSpeedShards
from ckptsurgeon.formats.fields.constants import CODES
from ckptsurgeon.formats.fields.values import MOMENTS, NUMBER, Box, Part, Place
from ckptsurgeon.formats.places import optimizer_state
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
TIED = "tied_modules."
UNIVERSAL = "universal"
"""The cut of what a universal copy beside the shards holds."""


def parts(checkpoint: DeepSpeedShards) -> list[Part]:
    """Every stretch of every parameter. Raises SurgeryError where it is not known whose it is."""
    if any(tree.get("ds_autoep_layers") for tree in checkpoint.models().values()):
        raise SurgeryError(
            f"{checkpoint.path.name} has experts of DeepSpeed's AutoEP, whose names and cuts are "
            "not known here",
            next="only operations on moments as a whole work here: reset, graft",
        )
    if experts.files(checkpoint):
        refuse_universal(checkpoint)
    if experts.files(checkpoint) and not experts.are_known(checkpoint):
        raise SurgeryError(
            f"{checkpoint.path.name} has experts, and does not say which ranks have which of them",
            next="only operations on moments as a whole work here: reset, graft",
        )
    for item in checkpoint.optimizers():
        if not item.universal:
            _refuse_nameless(checkpoint, item)
    out = list(stretches(checkpoint, strict=True))
    if _converted(checkpoint):
        _refuse_reshaped(out)
    if not checkpoint.sharded:
        return out
    return list(_trained(checkpoint, out))


def _refuse_nameless(checkpoint: DeepSpeedShards, item: Optimizer) -> None:
    """Raise SurgeryError for masters that have no names, or are not where they should be."""
    outer = around(checkpoint, item)
    if not checkpoint.sharded:
        if any("fp32" in str(key) for key in outer):
            raise SurgeryError(
                f"{item.file.name} keeps fp32 masters without the names of their parameters",
                next="train with ZeRO 1, which names them, then edit its checkpoints",
            )
    elif item.elastic or not any(name in outer for name in MASTERS):
        raise SurgeryError(
            f"{item.file.name} does not say where its masters are",
            next="save the step once without elastic checkpoints",
        )


def stretches(checkpoint: DeepSpeedShards, strict: bool = False) -> Iterator[Part]:
    """What is known of whose each stretch is, also where that does not do for an edit: weights may
    have no masters, and partitions without names are passed over unless it is `strict`."""
    if not checkpoint.sharded:
        yield from saved_weights(checkpoint, experts.are_known(checkpoint))
        yield from _numbered(checkpoint)
        return
    copied = list(_universal(checkpoint))
    flat = copied if _converted(checkpoint) else list(partitioned(checkpoint, strict))
    yield from flat
    if not _converted(checkpoint):
        yield from copied
    if checkpoint.stage() < 3:
        yield from named_weights(checkpoint, flat)


def named_weights(checkpoint: DeepSpeedShards, known: Iterable[Part]) -> Iterator[Part]:
    """All saved weights, under the names of their masters among `known`."""
    weights = list(saved_weights(checkpoint, experts.are_known(checkpoint)))
    masters = {part.parameter for part in known if part.kind == "master"}
    yield from _renamed(checkpoint, weights, masters)


def trainable(checkpoint: DeepSpeedShards) -> set[str]:
    """The names of what updates reach, as far as the model files say."""
    groups = (g for tree in checkpoint.models().values() for g in tree.get("param_shapes") or ())
    return {str(name) for group in groups for name in group}


def refuse_universal(checkpoint: DeepSpeedShards) -> None:
    """Raise SurgeryError where a copy would keep the numbers from before."""
    if any(item.universal for item in checkpoint.all_optimizers()):
        raise SurgeryError(
            "the universal copy of this step keeps weights and moments by whole parameters",
            next="move the copy out of the run, and convert the step again afterwards",
        )


def _refuse_reshaped(found: Iterable[Part]) -> None:
    """Raise SurgeryError where a universal copy alone has other parameters than its model files,
    which are as they were: of one tensor rank each, or with padding."""
    masters = {(part.parameter, part.cut): part.end for part in found if part.kind == "master"}
    trained = {name for name, _ in masters}
    for name, cut, kind, place, *_ in found:
        if kind == "weights" and name in trained and masters.get((name, cut)) != place.value.numel:
            raise SurgeryError(
                f"the universal copy has {name} whole, and {place.file.name} has it as one tensor "
                "rank did, or with padding",
                next="do it to the step that was converted, and convert it again",
            )


def _renamed(
    checkpoint: DeepSpeedShards, weights: Iterable[Part], masters: Collection[str]
) -> Iterator[Part]:
    """The weights under the names of their masters: of what modules share, one name has them."""
    tied = {name.split(".", 2)[2]: name for name in masters if name.startswith(TIED)}
    shared: dict[str, str] = {}
    for tree in checkpoint.models().values():
        shared |= {str(k): str(v) for k, v in dict(tree.get("shared_params") or {}).items()}
    for part in weights:
        inside = part.parameter.partition(".")[2]
        names = (part.parameter, shared.get(part.parameter, ""), tied.get(inside, ""))
        name = next((name for name in names if name in masters), part.parameter)
        yield part._replace(parameter=name)


def _trained(checkpoint: DeepSpeedShards, found: Sequence[Part]) -> Iterator[Part]:
    """All but buffers and frozen weights. Raises SurgeryError for others without a master."""
    masters = {part.parameter for part in found if part.kind == "master"}
    still, reached = set(), trainable(checkpoint)
    for tree in checkpoint.models().values():
        still |= {*(tree.get("buffer_names") or ()), *(tree.get("frozen_param_shapes") or ())}
    for part in found:
        if part.kind != "weights" or part.parameter in masters:
            yield part
        elif part.parameter not in still and (part.parameter in reached or not reached):
            raise SurgeryError(
                f"{part.parameter} has weights in {part.place.file.name} and no fp32 master in any "
                "shard",
                next=command("verify", "--level", "3", why="list what contradicts itself"),
            )


def _gated(checkpoint: DeepSpeedShards) -> bool:
    return any(map(is_gated, checkpoint.models().values()))


def tensor_rank(checkpoint: DeepSpeedShards, path: Path) -> TensorRank:
    """That of a model file."""
    ranks = tensor_ranks(checkpoint.models())
    return TensorRank(model_rank(path.name) % ranks, ranks, _gated(checkpoint))


def saved_weights(checkpoint: DeepSpeedShards, with_experts: bool) -> Iterator[Part]:
    """In the layer files of a pipeline, else in the model files; a cut is a tensor rank. Those of
    experts are named as all ranks count them."""
    tensor, gated = tensor_ranks(checkpoint.models()), _gated(checkpoint)
    layers = [path for path in sorted(checkpoint.folder.iterdir()) if LAYER.fullmatch(path.name)]
    checkpoint.read(layers)
    for path in layers:
        match = LAYER.fullmatch(path.name)
        if match is not None:
            prefix, rank = f"{int(match[1])}.", TensorRank(int(match[2] or 0), tensor, gated)
            yield from _tensors(path, (), checkpoint.trees[path], prefix, rank)
    for path, tree in checkpoint.models().items() if not layers else ():
        rank = tensor_rank(checkpoint, path)
        yield from _tensors(path, ("module",), tree.get("module") or {}, "", rank)
    files = experts.files(checkpoint) if with_experts else []
    checkpoint.read(files)
    for path in files:
        rank = TensorRank(model_rank(path.name) % tensor, tensor, gated)
        yield from _tensors(path, (), checkpoint.trees[path], "", rank)


def _tensors(
    file: Path,
    inside: tuple[Key, ...],
    found: Mapping[Any, Any],
    prefix: str,
    rank: TensorRank,
) -> Iterator[Part]:
    """Of the dict at `inside` in one file, which is of a tensor rank; Megatron without pipelines
    has one in another."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _tensors(file, (*inside, name), value, f"{prefix}{name}.", rank)
        if isinstance(value, Tensor):
            place = Place(file, (*inside, name), value)
            block = box(f"{prefix}{name}", value.size, rank)
            yield Part.whole(f"{prefix}{name}", str(rank.number), "weights", place, block)


def partitioned(checkpoint: DeepSpeedShards, strict: bool) -> Iterator[Part]:
    """Masters and moments in the partitions of ZeRO, data rank after data rank."""
    tensor, gated = tensor_ranks(checkpoint.models()), _gated(checkpoint)
    counts = experts.counts(checkpoint)
    before: dict[tuple[str, str, str], int] = {}
    padded = checkpoint.stage() == 3
    moments = {kind: _by_file(checkpoint.locate(kind)) for kind in MOMENTS}
    for item in sorted(checkpoint.optimizers(), key=data_rank):
        stage, cut = divmod(model_rank(item.file.name), tensor)
        spread = experts.spread(checkpoint, item)
        shapes = local_shapes(checkpoint, item)
        for kind, places in _partitions(checkpoint, item, moments):
            try:
                found = list(fragments.fragments(checkpoint, item, places)) if places else []
            except SurgeryError:
                if strict:
                    raise
                continue
            group = {place.path: i for i, place in enumerate(places)}
            for local, place, start, end in found:
                ranks = spread[group[place.path]] if spread else 0
                name = experts.of_all(local, counts, data_rank(item)[1], ranks) if ranks else local
                # Each pipeline stage has a copy of what it ties; the weights are the first one's.
                where = f"{cut} of stage {stage}" if stage and name.startswith(TIED) else str(cut)
                first = before.get((name, where, kind), 0)
                before[name, where, kind] = first + end - start
                rank = TensorRank(cut, tensor, gated)
                block = box(local, shapes[local], rank) if local in shapes else None
                if padded and block is not None:  # the last rank has more than is left
                    end = min(end, start + block.numel - first)
                if start < end:
                    yield Part(name, where, kind, place, start, end, first, block)


def local_shapes(checkpoint: DeepSpeedShards, item: Optimizer) -> dict[str, tuple[int, ...]]:
    """What the model file of the same rank says of the parameters of one shard."""
    rank = model_rank(item.file.name)
    trees = (t for path, t in checkpoint.models().items() if model_rank(path.name) == rank)
    groups = next((tree["param_shapes"] for tree in trees if tree.get("param_shapes")), ())
    return {str(n): fragments.sizes(shape) for group in groups for n, shape in group.items()}


def _by_file(places: Iterable[Place]) -> dict[Path, list[Place]]:
    out: dict[Path, list[Place]] = {}
    for place in places:
        out.setdefault(place.file, []).append(place)
    return out


def _partitions(
    checkpoint: DeepSpeedShards, item: Optimizer, moments: Mapping[str, dict[Path, list[Place]]]
) -> Iterator[tuple[str, list[Place]]]:
    """The flat tensors of each kind in one shard; `moments` are those of all shards."""
    outer = around(checkpoint, item)
    for key in MASTERS:
        if isinstance(outer.get(key), (list, tuple)):
            flats = enumerate(outer[key])
            yield "master", [Place(item.file, (*item.outer, key, i), flat) for i, flat in flats]
    for kind in MOMENTS:
        places = moments[kind].get(item.file, [])
        coded = any(isinstance(p.value, Tensor) and p.value.dtype == CODES for p in places)
        yield kind, [] if coded else places


# --- other ways to keep them ---------------------------------------------------------------------


def _converted(checkpoint: DeepSpeedShards) -> bool:
    """Whether the universal copy is all that there is."""
    return all(item.universal for item in checkpoint.all_optimizers())


def _universal(checkpoint: DeepSpeedShards) -> Iterator[Part]:
    """Masters and moments of a universal copy, by whole parameters: a cut of their own, unless all
    weights lie in one tensor rank and are theirs."""
    whole = _converted(checkpoint) and tensor_ranks(checkpoint.models()) == 1
    copies = [item for item in checkpoint.all_optimizers() if item.universal]
    for kind, stem in (("master", "fp32"), *((kind, kind) for kind in MOMENTS)):
        for item in copies:
            files = [*disk.matching(item.file.parent, f"*/{stem}.pt")]
            checkpoint.read(files)
            for file in files:
                tree = checkpoint.trees[file]
                path: tuple[Key, ...] = () if isinstance(tree, Tensor) else ("param",)
                tensor = tree if isinstance(tree, Tensor) else tree.get("param")
                if isinstance(tensor, Tensor):
                    cut, place = "0" if whole else UNIVERSAL, Place(file, path, tensor)
                    block = Box.all(tensor.size, replica=not whole) if path else None
                    yield Part.whole(file.parent.name, cut, kind, place, block)


def _numbered(checkpoint: DeepSpeedShards) -> Iterator[Part]:
    """The moments of stage 0 by number, as no name is saved with them."""
    for item in checkpoint.optimizers():
        before, states = optimizer_state.states(checkpoint, item.file, item.base)
        for key, state in states.items():
            for kind in MOMENTS:
                value, name = state.get(kind), f"{NUMBER}{key}"
                if isinstance(value, Tensor):
                    place = Place(item.file, (*before, key, kind), value)
                    yield Part.whole(name, item.file.name, kind, place)
