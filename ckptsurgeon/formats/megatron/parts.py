"""Which bytes are whose in a legacy Megatron-LM step: weights, fp32 masters, moments of each rank.

The distributed optimizer keeps all weights of a model in one buffer, and masters and moments in
flat tensors in the same order; torch saves a weight as a view, so its offset is its place in them.
Other optimizers number their parameters, each param group in the order of the model. Source:
`megatron/core/distributed/param_and_grad_buffer.py`, `megatron/core/optimizer/__init__.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckptsurgeon.errors import SurgeryError, count
from ckptsurgeon.files.dtypes import FLOATS
from ckptsurgeon.files.pickles.tree import Tensor, get
from ckptsurgeon.formats.fields.values import MOMENTS, NUMBER, Box, Part, Place
from ckptsurgeon.formats.megatron import experts
from ckptsurgeon.formats.megatron.shards import MegatronShards, Optimizer
from ckptsurgeon.formats.tensors.strips import contiguous
from ckptsurgeon.plans.edits import Key

CHUNK = re.compile(r"model(\d*)")
FLAT = {"param": "master", **{kind: kind for kind in MOMENTS}}
"""Key of a flat tensor → what is in it."""
ALIGNED = 64
"""Elements at whose multiples a weight begins in a buffer."""
MASTERS = "fp32_from_fp16_params"
HINT = "only operations on moments as a whole work here: reset, graft"


class Named(NamedTuple):
    """A weight of one model chunk, with the name that tells it from those of other stages."""

    name: str
    chunk: int
    place: Place


def parts(checkpoint: MegatronShards) -> list[Part]:
    """Every stretch of every rank, which is a cut. Raises SurgeryError where it is not known whose
    it is."""
    out: list[Part] = []
    spread = experts.ranks(checkpoint.args()) > 1
    for file, prefix in checkpoint.roots():
        weights = list(_weights(checkpoint, file, prefix))
        _refuse_lost_pieces(checkpoint, weights)
        if spread:
            known = experts.of_all([each.name for each in weights], experts.rank(file))
            weights = [each._replace(name=known.get(each.name, each.name)) for each in weights]
        flat = file.with_name("distrib_optim.pt")
        if flat in checkpoint.trees:
            found = _in_buffers(checkpoint, flat, weights)
        elif any(path.parent == file.parent and path != file for path in checkpoint.trees):
            raise unknown(file, "which parameters the layer-wise optimizer beside it has")
        else:
            found = _in_groups(checkpoint, file, weights)
        out += (part._replace(cut=file.parent.name) for part in found)
    out = list(_beside_state(checkpoint, out))
    if int(checkpoint.args().get("tensor_model_parallel_size") or 1) > 1:
        return out  # no file says along which axis a weight is cut
    whole = {
        (part.parameter, part.cut): Box.all(part.place.value.size)
        for part in out
        if part.kind == "weights" and not (spread and experts.are_cut(part.parameter))
    }
    return [part._replace(box=whole.get((part.parameter, part.cut))) for part in out]


def _refuse_lost_pieces(checkpoint: MegatronShards, weights: Iterable[Named]) -> None:
    """Raise SurgeryError for experts of which the files can't have all."""
    args = checkpoint.args()
    tensor, cut = int(args.get("tensor_model_parallel_size") or 1), experts.tensor_ranks(args)
    if not experts.share_one_file(tensor, experts.ranks(args), cut):
        return
    if any(experts.ANY.match(each.name) for each in weights):
        raise SurgeryError(
            f"{checkpoint.path.name} has experts in {count(cut, 'piece')}, and files of {tensor} "
            "tensor ranks: ranks with other pieces have the same file, and it holds those of one",
            next="save with --ckpt-format torch_dist, which keeps every piece",
        )


def _weights(checkpoint: MegatronShards, file: Path, prefix: tuple[Key, ...]) -> Iterator[Named]:
    """In the order of the model. Layers are counted anew in each stage and chunk of a pipeline."""
    tree = get(checkpoint.trees[file], prefix)
    stage = ""
    if int(checkpoint.args().get("pipeline_model_parallel_size") or 1) > 1:
        stage = f"stage{int(file.parent.name.split('_')[3])}."
    for key, model in tree.items():
        match = CHUNK.fullmatch(str(key))
        if match is None:
            continue
        if not isinstance(model, Mapping) or any(isinstance(v, Mapping) for v in model.values()):
            raise unknown(file, "in which order the model has its nested weights")
        chunk = f"chunk{match[1]}." if match[1] else ""
        for name, tensor in model.items():
            if isinstance(tensor, Tensor) and tensor.dtype in FLOATS:
                place = Place(file, (*prefix, key, name), tensor)
                yield Named(f"{stage}{chunk}{name}", int(match[1] or 0), place)


def _in_buffers(checkpoint: MegatronShards, file: Path, weights: Sequence[Named]) -> Iterator[Part]:
    """Of the distributed optimizer. Raises SurgeryError unless the weights of one storage fill a
    flat tensor: then it has no gaps but those before aligned weights."""
    views: dict[tuple[int, str], list[Named]] = {}
    for each in weights:
        views.setdefault((each.chunk, each.place.value.storage), []).append(each)
    for path, buffer in _buffers(checkpoint.trees[file]):
        fitting = [key for key, mine in views.items() if _fills(mine, buffer["numel_unpadded"])]
        fitting = [key for key in fitting if key[0] == fitting[0][0]]
        if len(fitting) != 1:
            numel = buffer["numel_unpadded"]
            raise unknown(file, f"which weights the {count(numel, 'element')} of a buffer are of")
        seen = set()
        for name, _, place in views.pop(fitting[0]):
            start = place.value.offset
            if start in seen:  # shared: one parameter by two names
                continue
            seen.add(start)
            yield Part.whole(name, "", "weights", place)
            for key, kind in FLAT.items():
                if isinstance(buffer.get(key), Tensor):
                    flat = Place(file, (*path, key), buffer[key])
                    yield Part(name, "", kind, flat, start, start + place.value.numel, 0)

    for mine, *others in views.values():
        named = [mine, *others]
        if _kept_elsewhere(checkpoint, file, named):
            yield from (Part.whole(each.name, "", "weights", each.place) for each in named)
            continue
        # a frozen weight has a storage of its own
        if others or mine.place.value.storage_numel != mine.place.value.numel:
            raise unknown(file, f"where the masters of {mine.name} are, which lies in a buffer")


def _kept_elsewhere(checkpoint: MegatronShards, file: Path, weights: Sequence[Named]) -> bool:
    """Whether the flat tensors of these are in the file of another rank that has the same weights,
    which alone saves them: here is None in their place."""
    tree = checkpoint.trees[file]
    if not isinstance(tree, (list, tuple)) or None not in tree:
        return False
    folder = file.parent.name
    return not any(_first(checkpoint, folder, each.name) == folder for each in weights)


def _first(checkpoint: MegatronShards, folder: str, name: str) -> str:
    """The folder with the state of a parameter that is in this one."""
    return experts.first(folder, checkpoint.args(), experts.ANY.match(name) is not None)


def _beside_state(checkpoint: MegatronShards, parts: Sequence[Part]) -> Iterator[Part]:
    """Weights whose masters are in the file of another rank are one more copy of that rank's cut,
    so that they are rounded from its masters and stay equal to it."""
    having = {(part.parameter, part.cut) for part in parts if part.kind == "master"}
    for part in parts:
        if having and (part.parameter, part.cut) not in having:
            first = _first(checkpoint, part.cut, part.parameter)
            if (part.parameter, first) in having:
                part = part._replace(cut=first)
        yield part


def _buffers(tree: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """The dict of each buffer, in the order of the optimizers and model chunks."""
    if isinstance(tree, Mapping) and "numel_unpadded" in tree:
        yield path, tree
        return
    entries = dict(enumerate(tree)) if isinstance(tree, (list, tuple)) else tree
    for key, value in entries.items():
        if isinstance(value, (Mapping, list, tuple)):
            yield from _buffers(value, (*path, key if isinstance(key, (str, int)) else repr(key)))


def _fills(weights: Sequence[Named], numel: int) -> bool:
    end = 0
    spans = {(w.place.value.offset, w.place.value.numel): w.place.value for w in weights}
    for (start, size), tensor in sorted(spans.items()):
        if not contiguous(tensor) or not end <= start < end + ALIGNED:
            return False
        end = start + size
    return end == numel


def _in_groups(checkpoint: MegatronShards, file: Path, weights: Sequence[Named]) -> Iterator[Part]:
    """Of optimizers that number their parameters: those of one shape have the order of the model.
    Without masters the moments may stay numbered; with them raises SurgeryError."""
    items = [item for item in checkpoint.optimizers() if item.file == file]
    numbered = [each for item in items for each in _numbered(checkpoint, item)]
    named = by_shape(numbered, weights)
    if named is None and any("master" in kinds for _, _, kinds in numbered):
        raise unknown(file, "which weights its fp32 masters are of")
    for owner, _, kinds in numbered:
        name = f"{NUMBER}{owner[1]}" if named is None else named[owner].name
        for kind, place in kinds.items():
            yield Part.whole(name, "", kind, place)
    trained = weights if named is None else named.values()
    yield from (Part.whole(each.name, "", "weights", each.place) for each in trained)


Owner = tuple[tuple[Key, ...], int]
"""Where an optimizer is, and the number of one of its parameters."""


def _numbered(
    checkpoint: MegatronShards, item: Optimizer
) -> Iterator[tuple[Owner, int, dict[str, Place]]]:
    """The number, the group and what is kept of each parameter of one optimizer."""
    outer = get(checkpoint.trees[item.file], item.base[:-1])
    masters = outer.get(MASTERS) if isinstance(outer, Mapping) else None
    states = get(checkpoint.trees[item.file], (*item.base, "state"))
    for g, group in enumerate(checkpoint.groups(item)):
        numbers = group.get("params", ())
        if masters is not None and len(masters[g]) != len(numbers):
            raise unknown(item.file, "which of its parameters have an fp32 master")
        for j, number in enumerate(numbers):
            state = states.get(number, {})
            kinds = {
                kind: Place(item.file, (*item.base, "state", number, kind), state[kind])
                for kind in MOMENTS
                if isinstance(state.get(kind), Tensor)
            }
            if masters is not None:
                path = (*item.base[:-1], MASTERS, g, j)
                kinds["master"] = Place(item.file, path, masters[g][j])
            yield (item.base, number), g, kinds


def by_shape(
    numbered: Sequence[tuple[Owner, int, Mapping[str, Place]]], weights: Sequence[Named]
) -> dict[Owner, Named] | None:
    """The weight of each number; None unless all of one shape are in one group, as many as there
    are weights: then both are in the order of the model."""
    shapes: dict[tuple[int, ...], list[Owner]] = {}
    groups: dict[tuple[int, ...], set[tuple[Any, int]]] = {}
    for owner, g, kinds in numbered:
        sizes = {place.value.size for place in kinds.values()}
        if len(sizes) != 1:
            return None
        size = sizes.pop()
        shapes.setdefault(size, []).append(owner)
        groups.setdefault(size, set()).add((owner[0], g))
    out: dict[Owner, Named] = {}
    for size, owners in shapes.items():
        mine = [each for each in weights if each.place.value.size == size]
        if len(groups[size]) > 1 or len(mine) != len(owners):
            return None
        out.update(zip(owners, mine, strict=True))
    return out


def refuse_cut_otherwise(weights: Iterable[Part], states: Iterable[Part]) -> None:
    """Raise SurgeryError where a chunk of a state has no weights that are cut like it."""
    own = {part.cut: part.place.value.size for part in weights}
    for part in states:
        if own.get(part.cut) != part.place.value.size:
            raise SurgeryError(
                f"{part.place.path[0]} has a chunk at {part.cut}, and no weights of "
                f"{part.parameter} are cut like it",
                next=HINT,
            )


def unknown(file: Path, what: str) -> SurgeryError:
    """What to raise where the file does not say `what`."""
    where = f"{file.parent.name}/{file.name}"
    return SurgeryError(f"{where} does not say {what}", next=HINT)
