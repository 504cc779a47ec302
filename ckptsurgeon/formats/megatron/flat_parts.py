"""Which tensors are whose in a torch_dcp or fsdp_dtensor step: weights, masters and moments.

fsdp_dtensor names states as the model names parameters, and saves the weights that the optimizer
works on, which are fp32 unless the run has none: a load copies them to those of the forward pass.
torch_dcp numbers parameters, each param group in the order of the model. Source:
`_init_distributed_params` in `megatron/core/distributed/fsdp/src/megatron_fsdp/`, `state_dict` of
Float16OptimizerWithFloat16Params in `megatron/core/optimizer/optimizer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptsurgeon.files.dtypes import FLOATS
from ckptsurgeon.formats.dcp.shards import DcpShards
from ckptsurgeon.formats.fields.values import MOMENTS, NUMBER, Part, Place
from ckptsurgeon.formats.megatron.parts import (
    MASTERS,
    Named,
    Owner,
    by_shape,
    refuse_cut_otherwise,
    unknown,
)
from ckptsurgeon.formats.tensors.strips import MASTERS as IN_STATE

WEIGHT = re.compile(r"model\d*\.(.+)")
STATE = re.compile(r"optimizer(?:\.\d+)?(?:\.optimizer)?\.state\.(.+)\.(\w+)")
WRAPPERS = re.compile(r"^(?:module\.)+")
"""What DDP, FSDP and Float16Module put before a name: one or two more in the optimizer than in the
model."""
KINDS = {**dict.fromkeys(IN_STATE, "master"), **{kind: kind for kind in MOMENTS}}
"""Key of a state → what its tensors are of a parameter."""

Numbers = Mapping[int, Sequence[int]]
"""Number of a param group → the numbers of its parameters."""


def named(checkpoint: DcpShards) -> Iterator[Part]:
    """Of fsdp_dtensor, by the names of the states; weights without one have the model's. Raises
    SurgeryError for a state without weights."""
    owners: dict[str, str] = {}
    states: dict[str, dict[str, str]] = {}
    for name in checkpoint.saved.items:
        match = STATE.fullmatch(name)
        if match is not None and match[2] in KINDS:
            owners[WRAPPERS.sub("", match[1])] = match[1]
            states.setdefault(match[1], {})[KINDS[match[2]]] = name
    for name, place in _weights(checkpoint, checkpoint.saved.items):
        owner = owners.get(WRAPPERS.sub("", name), name)
        yield from _together(checkpoint, owner, place, states.pop(owner, {}))
    for owner in states:
        raise unknown(checkpoint.saved.path, f"which weights the state of {owner} is of")


def numbered(checkpoint: DcpShards, optimizers: Mapping[str, Numbers]) -> Iterator[Part]:
    """Of torch_dcp, where the order of the model tells the names. Without masters the moments may
    stay numbered; with them raises SurgeryError."""
    weights = [
        Named(name, 0, place) for name, place in _weights(checkpoint, checkpoint.saved.flattened())
    ]
    states = [
        each for base, groups in optimizers.items() for each in _states(checkpoint, base, groups)
    ]
    known = by_shape(states, weights)
    if known is None and any("master" in kinds for _, _, kinds in states):
        raise unknown(checkpoint.saved.path, "which weights its fp32 masters are of")
    for owner, _, kinds in states:
        names = {kind: str(place.path[0]) for kind, place in kinds.items()}
        if known is None:
            yield from _together(checkpoint, f"{NUMBER}{owner[1]}", None, names)
        else:
            yield from _together(checkpoint, known[owner].name, known[owner].place, names)
    if known is None:
        for name, place in _weights(checkpoint, checkpoint.saved.items):
            yield from _together(checkpoint, name, place, {})


def _weights(checkpoint: DcpShards, names: Iterable[str]) -> Iterator[tuple[str, Place]]:
    """Those of the model among `names`, without what their names begin with there."""
    for name in names:
        match, items = WEIGHT.fullmatch(name), checkpoint.saved.items.get(name)
        if match is None or items is None or not items.is_tensor:
            continue
        if items.whole is None:
            raise unknown(checkpoint.saved.path, f"the dtype and the shape of {name}")
        if items.whole[0] in FLOATS:
            yield match[1], _tensor(checkpoint, name)


def _states(
    checkpoint: DcpShards, base: str, groups: Numbers
) -> Iterator[tuple[Owner, int, dict[str, Place]]]:
    """The number, the group and what is kept of each parameter of one optimizer."""
    items = checkpoint.saved.items
    masters = f"{base.removesuffix('.optimizer')}.{MASTERS}."
    having = {name for name in items if name.startswith(masters)}
    for g, numbers in sorted(groups.items()):
        own = {name for name in having if name.startswith(f"{masters}{g}.")}
        if having and own != {f"{masters}{g}.{j}" for j in range(len(numbers))}:
            raise unknown(checkpoint.saved.path, "which of its parameters have an fp32 master")
        for j, number in enumerate(numbers):
            names = {kind: f"{base}.state.{number}.{kind}" for kind in MOMENTS}
            if having:
                names["master"] = f"{masters}{g}.{j}"
            kinds = {
                kind: _tensor(checkpoint, name) for kind, name in names.items() if name in items
            }
            yield ((base,), number), g, kinds


def _tensor(checkpoint: DcpShards, name: str) -> Place:
    path = checkpoint.saved.path
    return Place(path, (name,), checkpoint.trees[path][name])


def _together(
    checkpoint: DcpShards, owner: str, weights: Place | None, states: Mapping[str, str]
) -> Iterator[Part]:
    """The chunks of one parameter: its weights, and by kind the names of what its state keeps."""
    saved = checkpoint.saved
    kept = [
        part
        for kind, name in states.items()
        for part in checkpoint.chunks(saved, name, owner, kind)
    ]
    if weights is not None:
        own = list(checkpoint.chunks(saved, str(weights.path[0]), owner, "weights"))
        refuse_cut_otherwise(own, kept)
        yield from own
    yield from kept
