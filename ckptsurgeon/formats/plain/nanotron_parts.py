"""Which bytes are whose in a nanotron step: weights, fp32 masters and moments of each parameter.

Each weight, or each tensor-parallel shard of one, is the only tensor (`data`) of a safetensors file
under `model/`, whose path is its name. With ZeRO-1 each data rank's optimizer file has the next
elements of masters and moments, flat. Source: `nanotron/serialize/{weights,utils}.py`,
`nanotron/optim/{zero,gradient_accumulator}.py`, 2411b02.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import NotUnderstood, SurgeryError
from ckptsurgeon.files import json_text
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.fields.understood import not_understood, problem, understood
from ckptsurgeon.formats.fields.values import MOMENTS, Part, Place
from ckptsurgeon.formats.places import optimizer_state
from ckptsurgeon.formats.places.safetensors_beside import SafetensorsBeside
from ckptsurgeon.formats.step_folders import listed
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

SHARD = re.compile(
    r"optimizer_pp-(?P<pp>\d+)-of-\d+(?:_dp-(?P<dp>\d+)-of-\d+)?_tp-(?P<tp>\d+)-of-\d+"
    r"(?:_exp-(?P<exp>\d+)-of-\d+)?\.pt"
)
WEIGHT = re.compile(
    r"model_(?P<name>.+?)(?:_pp-rank-(?P<pp>\d+)-of-\d+_tp-rank-(?P<tp>\d+)-of-\d+"
    r"(?:_exp-rank-(?P<exp>\d+)-of-\d+)?)?\.safetensors"
)
CONFIG, UNRANKED = "optimizer_config.json", "lr_scheduler.pt"
"""What says the ranks, and the one scheduler up to November 2024."""
STAGE = re.compile(r"_pp-(\d+)-of-")
DATA, MASTERS, NAMES = "data", "gradient_accumulator", "names"


def stage_of(file: Path) -> str:
    """The number of the pipeline stage in the name of a rank's file; `` where it has none."""
    match = STAGE.search(file.name)
    return match[1] if match else ""


def missing(step: Path) -> list[str]:
    """The files of the optimizer and of the schedulers that the ranks in `CONFIG` load, and that
    are not there."""
    folder = step / "optimizer"
    if not disk.is_file(folder / CONFIG):
        return [f"optimizer/{CONFIG}"]
    config = json_text.mapping(folder / CONFIG)
    with understood(folder / CONFIG):
        pp, dp, tp, experts = (
            int(config["parallelism"].get(f"{kind}_size", 1))
            for kind in ("pp", "dp", "tp", "expert_parallel")
        )
        sharded = config["type"] == "ZeroDistributedOptimizer"
        reason = problem("ranks", pp * (dp if sharded else 1) * tp * experts)
    if reason:
        raise NotUnderstood(
            f"{folder / CONFIG}: {reason}",
            next="compare its sizes with the command line of the trainer",
        )
    there = {f"optimizer/{name}" for name in listed(folder) if SHARD.fullmatch(name)}
    expert = any("_exp-" in name for name in there) or not there
    schedulers = {f"lr_scheduler/{name}" for name in listed(step / "lr_scheduler")}
    wanted = []
    for p, t, e in product(range(pp), range(tp), range(experts if expert else 1)):
        ranks = f"_tp-{t}-of-{tp}" + (f"_exp-{e}-of-{experts}" if expert else "") + ".pt"
        for d in range(dp if sharded else 1):
            data = f"_dp-{d}-of-{dp}" if sharded else ""
            wanted.append(f"optimizer/optimizer_pp-{p}-of-{pp}{data}{ranks}")
        if schedulers and f"lr_scheduler/{UNRANKED}" not in schedulers:
            wanted.append(f"lr_scheduler/lr_scheduler_pp-{p}-of-{pp}{ranks}")
    return sorted({*wanted} - there - schedulers)


def parts(checkpoint: SafetensorsBeside, shards: Collection[Path]) -> list[Part]:
    """Every stretch; `shards` are the optimizer's files. What every rank keeps whole has its
    weights with the first of them. Raises SurgeryError for a weight whose master is in no file of
    its ranks, and for a master without weights."""
    kept = [part for path in _in_order(shards) for part in _kept(checkpoint, path)]
    starts: dict[tuple[str, str, str], int] = {}
    out = []
    for part in kept:
        key = part.parameter, part.cut, part.kind
        first = starts.get(key, 0)
        starts[key] = first + part.end
        out.append(part._replace(first=first))
    cuts: dict[str, list[str]] = {}
    for part in out:
        cuts.setdefault(part.parameter, []).append(part.cut)
    masters = {(part.parameter, part.cut) for part in out if part.kind == "master"}
    named = {name for name, _ in masters}
    for name, cut, place in _weights(checkpoint):
        where = cut or cuts.get(name, [""])[0]
        if name in named and (name, where) not in masters:
            raise SurgeryError(
                f"{name} has weights in {place.file.name} and no fp32 master of the same ranks",
                next=command("verify", "--level", "3", why="list what contradicts itself"),
            )
        out.append(Part.whole(name, where, "weights", place))
    if lost := sorted(named - {part.parameter for part in out if part.kind == "weights"}):
        raise SurgeryError(
            f"{lost[0]} has an fp32 master, and no file in {checkpoint.path.name}/model its "
            "weights",
            next=command("doctor", why="which step is whole"),
        )
    return out


def _in_order(shards: Collection[Path]) -> list[Path]:
    """Data rank after data rank."""

    def ranks(path: Path) -> tuple[int, ...]:
        match = SHARD.fullmatch(path.name)
        return tuple(int(match[k] or 0) for k in ("pp", "tp", "exp", "dp")) if match else ()

    return sorted(shards, key=ranks)


def _cut(match: re.Match[str] | None) -> str:
    return ".".join(match[key] or "0" for key in ("pp", "tp", "exp")) if match else ""


def _kept(checkpoint: SafetensorsBeside, path: Path) -> Iterator[Part]:
    """Of one optimizer file. Raises NotUnderstood for what is no tensor, or has no name."""
    cut = _cut(SHARD.fullmatch(path.name))
    before, states = optimizer_state.states(checkpoint, path, ())
    tree = checkpoint.trees[path]

    def whole(name: str, kind: str, at: tuple[Key, ...], value: Any) -> Part:
        if not isinstance(value, Tensor):
            raise not_understood(path, at, value, "a tensor", kind)
        return Part.whole(name, cut, kind, Place(path, at, value))

    def named(key: str) -> Mapping[Any, Any]:
        found: Any = tree.get(key) or {}
        if not isinstance(found, Mapping):
            raise not_understood(path, (key,), found, "a dict of parameters")
        return found

    for name, value in named(MASTERS).items():
        yield whole(str(name), "master", (MASTERS, name), value)
    names = named(NAMES)
    for number, state in states.items():
        for kind in (kind for kind in MOMENTS if kind in state):
            if number not in names:
                raise not_understood(path, (NAMES,), names, f"a name of parameter {number}")
            yield whole(str(names[number]), kind, (*before, number, kind), state[kind])


def _weights(checkpoint: SafetensorsBeside) -> Iterator[tuple[str, str, Place]]:
    """Name, cut by the ranks in the file's name or ``, and place."""
    folder = checkpoint.path / "model"
    for path in sorted(path for path in disk.below(folder) if path.suffix == ".safetensors"):
        match = WEIGHT.fullmatch(path.name)
        place = checkpoint.tensors(path).get(DATA)
        if match is None or place is None:
            raise SurgeryError(
                f"{path.relative_to(checkpoint.path)} is no weight by its name or content",
                next="move it out of the step",
            )
        name = ".".join((*path.parent.relative_to(folder).parts, match["name"]))
        yield name, _cut(match) if match["pp"] else "", place
