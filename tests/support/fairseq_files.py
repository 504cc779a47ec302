"""Checkpoints as `metaseq/trainer.py` (`Trainer.state_dict`) describes them: it does not install
beside a present torch. A real Adam of torch makes the optimizer states."""

from __future__ import annotations

import copy
import shutil
import sys
import types
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.snapshot import snapshot

PEAK, WARMUP, TOTAL = 1.2e-4, 10, 100
INSIDE = {
    "": {"decoder.embed_tokens.weight": (4, 7), "decoder.layer_norm.weight": (7,)},
    "decoder.layers.0": {"self_attn.q_proj.weight": (7, 7), "self_attn.q_proj.bias": (6,)},
}
"""FSDP module → the parameters that its flat one holds: of both, the second data rank's piece ends
in padding."""
PIECES = {
    f"{path}.flat_param_0" if path else "flat_param_0": (
        [f"{path}.{name}" if path else name for name in sizes],
        [torch.Size(size).numel() for size in sizes.values()],
    )
    for path, sizes in INSIDE.items()
}  # fmt: skip
"""Flat parameter → the names in it, and their numbers of elements."""


class LockingArray:
    """As metaseq's, which the first rank saves with the position of its data: the lengths of the
    documents, in bytes."""

    def __init__(self, lengths: bytes) -> None:
        self.lengths = lengths

    def __getstate__(self) -> tuple[bytes, int]:
        return self.lengths, 1

    def __setstate__(self, state: tuple[bytes, int]) -> None:
        self.lengths = state[0]


LockingArray.__module__ = "metaseq.data.document_to_sequence"
for name in ("metaseq", "metaseq.data", LockingArray.__module__):
    sys.modules[name] = types.ModuleType(name)
vars(sys.modules[LockingArray.__module__])["LockingArray"] = LockingArray
NAMES = tuple(f"-model_part-{m}-shard{d}" for m in range(2) for d in range(2))


def rate(updates: int, peak: float = PEAK) -> float:
    """Polynomial decay of power 1 to 0, as the flags give it at a number of updates."""
    if updates <= WARMUP:
        return peak * updates / WARMUP
    return peak * (1 - (updates - WARMUP) / (TOTAL - WARMUP))


def configuration(world: int) -> dict[str, Any]:
    """What a trainer with `world` ranks in all saves as `cfg`."""
    return {
        "_name": None,
        "common": {"fp16": True, "fp16_init_scale": 4, "model_parallel_size": min(world, 2)},
        "distributed_training": {"distributed_world_size": world, "use_sharded_state": world > 1},
        "optimization": {"lr": [PEAK], "clip_norm": 1.0},
        "lr_scheduler": {
            "_name": "polynomial_decay", "warmup_updates": WARMUP, "total_num_update": TOTAL,
            "end_learning_rate": 0.0,
        },
        "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.95)", "weight_decay": 0.1},
    }  # fmt: skip


def size_of(flat: str, rank: int = 0) -> tuple[int, int]:
    """How many elements a data rank has of a flat parameter, and how many of them are padding: as
    torch.chunk cuts it in two, each as long as the first."""
    total = sum(PIECES[flat][1])
    size = -(-total // 2)
    return size, size - min(size, total - rank * size)


def optimizer(rank: int) -> torch.optim.Adam:
    """Of one rank: its pieces of the flat parameters."""
    torch.manual_seed(rank)
    parameters = [torch.nn.Parameter(torch.randn(size_of(flat)[0])) for flat in PIECES]
    return torch.optim.Adam(
        [{"params": parameters, "weight_decay": 0.1}], lr=0.0, betas=(0.9, 0.95), eps=1e-8
    )


def _pad(adam: torch.optim.Adam, rank: int, gradients: bool) -> None:
    """Zeros where the pieces are padded, or the next gradients with zeros there."""
    for parameter, flat in zip(adam.param_groups[0]["params"], PIECES, strict=True):
        if gradients:
            parameter.grad = torch.randn(parameter.shape)
        tensor = parameter.grad if gradients else parameter.data
        size, padding = size_of(flat, rank)
        tensor[size - padding :] = 0


def metadata(rank: int) -> dict[str, Any]:
    """As fairscale's `local_metadata_dict` has it of one rank."""
    return {
        "param_metadata": [
            {
                "fsdp_path": path,
                "params": {
                    "flat_param_0": {
                        "names": list(sizes),
                        "shapes": [torch.Size(size) for size in sizes.values()],
                        "numels": [torch.Size(size).numel() for size in sizes.values()],
                        "padding": size_of(flat, rank)[1],
                    }
                },
                "no_broadcast_optim_state": False,
                "shared_param_info": [],
            }
            for (path, sizes), flat in zip(INSIDE.items(), PIECES, strict=True)
        ],
        "buffer_names": [],
    }


def saved(
    adam: torch.optim.Adam, updates: int, *, fused: bool, world: int, rank: int = 0
) -> dict[str, Any]:
    """The dict of one file; `fused`: apex's second FusedAdam, which steps in the group."""
    state = copy.deepcopy(adam.state_dict())
    for inner in state["state"].values():
        step = int(inner.pop("step"))
        if fused:
            state["param_groups"][0]["step"] = step
        else:
            inner["step"] = step
    state["loss_scale"] = 8.0
    history = {
        "criterion_name": "VocabParallelCrossEntropyCriterion",
        "optimizer_name": "MemoryEfficientFP16Optimizer",
        "lr_scheduler_state": {"best": None},
        "num_updates": updates,
    }
    return {
        "cfg": configuration(world),
        "model": {
            flat: parameter.detach().half()
            for flat, parameter in zip(PIECES, adam.param_groups[0]["params"], strict=True)
        },
        "criterion": None,
        "optimizer_history": [{**history, "num_updates": 5}, history],
        "task_state": {},
        "extra_state": {
            "train_iterator": {"epoch": 1, "sequences_consumed": [updates, updates], "n": 0},
            "metrics": [("default", [(0, "wall", "TimeMeter", {"init": 0.0, "n": 0})])],
            "previous_training_time": 12.5,
        },
        "last_optimizer_state": state,
        "shard_metadata": metadata(rank),
    }  # fmt: skip


def make_run(
    root: Path,
    *,
    steps: Sequence[int] = (10, 20, 30),
    suffixes: Sequence[str] = NAMES,
    fused: bool = False,
    folders: bool = False,
    arguments: bool = False,
    links: bool = False,
    streamed: bool = False,
    command_line: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """A run with the files of every step, and `checkpoint_last*` as copies of the last one.
    `folders`: a folder a step and no copies. `arguments`: the flags as an argparse.Namespace.
    `links`: of metaseq since 2023, which makes links to the whole paths instead of copies.
    `streamed`: with what its streaming tasks save of their data."""
    root.mkdir(parents=True)
    for rank, suffix in enumerate(suffixes):
        adam, piece = optimizer(rank), int(suffix.endswith("shard1"))
        _pad(adam, piece, gradients=False)
        for update in range(1, max(steps) + 1):
            _pad(adam, piece, gradients=True)
            adam.step()
            adam.param_groups[0]["lr"] = rate(update)
            if update not in steps:
                continue
            document = saved(adam, update, fused=fused, world=len(suffixes), rank=piece)
            if streamed and rank == 0:
                position = document["extra_state"]["train_iterator"]
                position["tokenization_cache"] = LockingArray(bytes(range(256)) * update)
            for section, flags in (command_line or {}).items():
                document["cfg"].setdefault(section, {}).update(flags)
            if arguments:
                flat = {k: v for part in document["cfg"].values() if part for k, v in part.items()}
                document |= {"cfg": None, "args": Namespace(**flat)}
            name = f"checkpoint_{update}/checkpoint" if folders else f"checkpoint_{update}"
            path = root / f"{name}{suffix}.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save(document, path)
        if links:
            (root / f"checkpoint_last{suffix}.pt").symlink_to(path.absolute())
        elif not folders:
            shutil.copyfile(path, root / f"checkpoint_last{suffix}.pt")
    return root


def resumed(file: Path, *, peak: float = PEAK) -> tuple[torch.optim.Adam, dict[str, Any]]:
    """What a restart holds: torch's own load, then the lr of the flags at the saved updates."""
    document = torch.load(file, weights_only=False)
    state = document["last_optimizer_state"]
    for inner in state["state"].values():
        inner.setdefault("step", state["param_groups"][0].get("step"))
        inner["step"] = torch.tensor(float(inner["step"]))
    adam = optimizer(0)
    adam.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    for group in adam.param_groups:
        group["lr"] = rate(document["optimizer_history"][-1]["num_updates"], peak)
    return adam, document


def names(root: Path) -> set[str]:
    """Of the run's own files, as the trainer lists them."""
    return {path.name for path in root.iterdir() if path.name != ".ckptsurgeon"}


def refused(root: Path, recipe: dict[str, Any]) -> str:
    before = snapshot(root)
    with pytest.raises(SurgeryError) as error:
        surgery.plan(Run.open(root), from_data(recipe))
    assert snapshot(root) == before
    return " ".join([error.value.what, *error.value.next])


def held(file: Path, key: str) -> Any:
    adam, _ = resumed(file)
    return adam.param_groups[0][key]
