"""The universal copy of a DeepSpeed step, as ds_to_universal makes it: a folder a parameter.

`<root>/global_step<N>_universal/`: the model files as they were, `zero/optimizer_state.pt` with
groups, scaler and clipping, and `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`. A run loads
it instead of the shards if it is configured with `load_universal`. No file says so: both get the
same values. Source: `deepspeed/checkpoint/ds_to_universal.py` and both stages' loaders, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ckptsurgeon import disk
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.values import MOMENTS, Hazard, Place, StateDict
from ckptsurgeon.formats.optimizers.state_dict import state_dict
from ckptsurgeon.plans.edits import Key

SUFFIX = "_universal"
FOLDER = re.compile(rf"global_step(\d+){SUFFIX}")
POINTER = "latest_universal"
GLOBAL = "optimizer_state.pt"
DEFECTS = (
    "DeepSpeed loads a universal copy of ZeRO 3 with the settings of param group 0 in every group: "
    "its weight decay also falls on biases and norms",
    "DeepSpeed loads a universal copy of ZeRO 3 with one Adam step that all groups share: torch's "
    "Adam counts it up once for each group, so the bias correction drifts",
)
"""What a plan warns of; both were seen with 0.19.8."""
HAZARD = Hazard(
    f"{POINTER} names a converted checkpoint, and training never moves it on",
    "leave --universal-checkpoint out after the first start",
)
"""Of a run with such a pointer."""


def folder(run: Path, step: int) -> Path:
    """Where the universal copy of `step` is, or would be."""
    return run / f"global_step{step}{SUFFIX}"


def is_state(path: Path) -> bool:
    """Whether this is the file with the groups of a universal copy."""
    return path.name == GLOBAL and path.parent.name == "zero"


def is_of_a_parameter(path: Path) -> bool:
    """Whether this is the master or a state of one parameter in a universal copy."""
    return path.stem in ("fp32", *STATES) and path.parent.parent.name == "zero"


STATES = (*MOMENTS, "step")
"""Of a parameter in a universal copy."""


def complete(copy: Path) -> bool:
    """Whether the conversion came to its end: it removes `tmp` and adds the model files last."""
    if not disk.is_folder(copy) or any(disk.exists(copy / name) for name in ("zero/tmp", "tmp")):
        return False
    return disk.is_file(copy / "zero" / GLOBAL) and any(disk.matching(copy, "*_model_states.pt"))


def shards(copy: Path) -> list[Path]:
    """The files of a universal copy that hold more than weights, below `zero`."""
    state = [copy / "zero" / GLOBAL]
    return state + sorted(p for p in disk.matching(copy, "zero/*/*.pt") if p.stem in STATES)


def moment(checkpoint: Checkpoint, state: Path, name: str) -> Iterator[Place]:
    """The moment `name` of every parameter. At stage 3 the file is the bare tensor."""
    for path, tree in checkpoint.trees.items():
        if path.parent.parent == state.parent and path.name == f"{name}.pt":
            bare = isinstance(tree, Tensor)
            yield Place(path, () if bare else ("param",), tree if bare else tree["param"])


def saved(checkpoint: Checkpoint, state: Path, base: tuple[Key, ...]) -> StateDict:
    """By the names of the files, and the groups of the file `state` under `base`."""
    names = {path.stem for path in disk.matching(state.parent, "*/*.pt")} - {"fp32", "step"}
    places = {
        name: list(moment(checkpoint, state, name)) or [Place(state, (), None)]
        for name in sorted(names)
    }
    tree = checkpoint.trees[state]
    for key in base:
        tree = tree[key]
    return StateDict(state, places, state_dict(state, base, tree).group)


def steps(checkpoint: Checkpoint, state: Path) -> Iterator[Place]:
    """Adam's step of every parameter; at stage 3 of the first group, which all groups load."""
    for path, tree in checkpoint.trees.items():
        if path.parent.parent == state.parent and path.name == "step.pt":
            yield Place(path, (), checkpoint.plain(path, tree))
    groups = checkpoint.trees[state].get("optimizer_state_dict", {}).get("state", {})
    for index in groups:
        inside = ("optimizer_state_dict", "state", index, "step")
        for place in checkpoint.at(state, inside):
            yield place._replace(wins=index == 0)
