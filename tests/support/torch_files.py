"""Torch files as trainers write them, the one writer of edits, and what torch makes of both."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptsurgeon.files.archives import append
from ckptsurgeon.files.pickles.reader import read_with_globals
from ckptsurgeon.files.pickles.scan import scan
from ckptsurgeon.plans.edits import Append, Change, Content, Hole, Span

MODES = [(False, False), (False, True), (True, False), (True, True)]
"""mmap × weights_only."""

GROUPS = ("optimizer_state_dict", "base_optimizer_state", "param_groups")
STATE = ("optimizer_state_dict", "base_optimizer_state", "state")
SCALER = ("optimizer_state_dict", "loss_scaler")


class LossScalerBase:
    def __init__(self, scale: float) -> None:
        self.cur_scale = scale


class DynamicLossScaler(LossScalerBase):
    def __init__(self) -> None:
        super().__init__(65536.0)
        self.cur_iter = 7
        self.last_overflow_iter = -1
        self.raise_error_at_min_scale = True
        self.dtype = torch.float16


class ZeroStageEnum(enum.IntEnum):
    optimizer_states = 1


fragment_address = collections.namedtuple("fragment_address", ["numel", "start"])

_FAKES: dict[str, list[Any]] = {
    "deepspeed.runtime.fp16.loss_scaler": [LossScalerBase, DynamicLossScaler],
    "deepspeed.runtime.zero.config": [ZeroStageEnum],
    "deepspeed.utils.tensor_fragment": [fragment_address],
}
for _module, _classes in _FAKES.items():
    for _class in _classes:
        _class.__module__ = _module


@contextlib.contextmanager
def trainer_installed() -> Iterator[None]:
    """The trainer's classes can be imported inside only, under the names of the real ones."""
    before = {name: module for name, module in sys.modules.items() if _belongs(name)}
    for name in before:
        del sys.modules[name]
    for name, classes in _FAKES.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            parent = ".".join(parts[:depth])
            sys.modules.setdefault(parent, types.ModuleType(parent))
        for item in classes:
            setattr(sys.modules[name], item.__name__, item)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _belongs(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _belongs(module: str) -> bool:
    return module == "deepspeed" or module.startswith("deepspeed.")


def optimizer_state(groups: int = 2, numel: int = 64) -> dict[str, Any]:
    """What torch's AdamW saves, with one betas tuple for all groups."""
    betas = (0.9, 0.999)
    return {
        "state": {
            i: {
                "step": torch.tensor(6.0),
                "exp_avg": torch.arange(1.0, numel + 1),
                "exp_avg_sq": torch.full((numel,), 0.5),
            }
            for i in range(groups)
        },
        "param_groups": [
            {"lr": 1e-4, "betas": betas, "eps": 1e-8, "weight_decay": 0.1 * i, "params": [i]}
            for i in range(groups)
        ],
    }


def plain_shard(groups: int = 2, numel: int = 64) -> dict[str, Any]:
    """A shard that `weights_only=True` loads."""
    flat = torch.arange(100.0)
    return {
        "optimizer_state_dict": {"base_optimizer_state": optimizer_state(groups, numel)},
        "module": collections.OrderedDict(
            a=torch.ones(3, 5).t(), b=torch.ones(4, dtype=torch.bfloat16)
        ),
        "views": [flat[:40], flat[40:]],
        "names": [f"layer.{i}.weight" for i in range(300)],
        "empty": {},
        "none": None,
    }


def zero_shard() -> dict[str, Any]:
    """A shard as ZeRO-1 and Megatron write it, with classes that are not installed here."""
    shard = plain_shard()
    state_dict = shard["module"]
    state_dict._metadata = collections.OrderedDict(v={"version": 1})
    args = argparse.Namespace(seed=1234, lr=1e-4, fp16=True, dtype=torch.bfloat16)
    args.itself = args
    shard["optimizer_state_dict"] |= {
        "loss_scaler": DynamicLossScaler(),
        "zero_stage": ZeroStageEnum.optimizer_states,
        "overflow": False,
        "clip_grad": 1.0,
        "param_slice_mappings": [collections.OrderedDict(w=fragment_address(64, 0))],
    }
    shard |= {
        "args": args,
        "rng_numpy": np.random.RandomState(1).get_state(),
        "rng_python": random.Random(1).getstate(),
        "shapes": torch.Size([3, 5]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "counts": collections.defaultdict(int, a=1),
        "tags": {"a", "b"},
        "ds_version": "0.19.8",
    }
    return shard


def read(data: bytes) -> Any:
    """The inert tree of one pickle."""
    return read_with_globals(scan(data))[0]


def save(tree: Any, path: Path, **options: Any) -> Path:
    with trainer_installed():
        torch.save(tree, path, **options)
    return path


def load(path: Path, mmap: bool = False, weights_only: bool = False) -> Any:
    with trainer_installed():
        return torch.load(path, mmap=mmap, weights_only=weights_only)


def load_shard(path: Path, mmap: bool = False) -> Any:
    """A shard that a real trainer saved, with the classes that it names."""
    return torch.load(path, weights_only=False, mmap=mmap)


def apply(path: Path, edit: Append | Content) -> None:
    """Only tests write files like this: no journal, no fsync."""
    if isinstance(edit, Append):
        assert path.stat().st_size == edit.old_size
        with path.open("r+b") as file:
            for offset, data in edit.writes:
                file.seek(offset)
                file.write(data)
        return
    old = path.read_bytes()
    parts = [
        bytes(p.size) if isinstance(p, Hole) else old[p.start : p.end] if isinstance(p, Span) else p
        for p in edit.pieces
    ]
    path.unlink()
    path.write_bytes(b"".join(parts))


def change(path: tuple[Any, ...], new: Any, old: Any = None) -> Change:
    return Change("shard.pt", str(path[-1]), old, new, path)


def edited(path: Path, *changes: Change, strict: bool = False) -> Append | Content:
    """Render and apply."""
    edit = append.render(path, "shard.pt", changes, strict=strict)
    apply(path, edit)
    return edit


def frozen(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Anything torch loads as nested tuples that compare by type and value; a cycle ends."""
    if id(value) in seen:
        return ("cycle", seen.index(id(value)))
    inside: Callable[[Any], Any] = lambda item: frozen(item, (*seen, id(value)))  # noqa: E731
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        content = (
            value.detach().contiguous().view(torch.uint8).flatten().tolist()
            if (value.dim())
            else value.item()
        )
        return kind, str(value.dtype), tuple(value.shape), value.stride(), content
    if isinstance(value, np.ndarray):
        return kind, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        items = [(inside(key), inside(item)) for key, item in value.items()]
        return kind, items, inside(getattr(value, "__dict__", None) or None)
    if isinstance(value, (list, tuple)):
        return kind, [inside(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(map(repr, value))
    if isinstance(value, (LossScalerBase, argparse.Namespace)):
        return kind, inside(vars(value))
    if dataclasses.is_dataclass(value):
        return kind, inside(vars(value))
    return kind, repr(value)


def shards(root: Path, step: int = 8) -> list[Path]:
    return sorted((root / f"global_step{step}").glob("*.pt"))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dict__"):
        return type(a) is type(b) and same(vars(a), vars(b))
    return bool((a == b) if not hasattr(a, "shape") else (a == b).all())
