"""Universal copies, made by DeepSpeed's own converter."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch


def convert(root: Path, step: int = 6, strict: bool = True) -> Path:
    """With `strict` each pattern of names that the run saved must fit one."""
    from deepspeed.checkpoint import ds_to_universal

    copy = root / f"global_step{step}_universal"
    ds_to_universal.main(
        Namespace(
            input_folder=str(root / f"global_step{step}"), output_folder=str(copy),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=strict,
            inject_missing_state=True,
        )
    )  # fmt: skip
    return copy


def converted(root: Path, step: int = 6, strict: bool = True) -> dict[str, dict[str, Any]]:
    """Masters and moments by parameter, as `ds_to_universal` makes them; the run stays as it is."""
    copy = root.with_name(f"{root.name}-copy")
    shutil.copytree(root, copy)
    zero = convert(copy, step, strict) / "zero"
    out: dict[str, dict[str, Any]] = {}
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        for file in zero.glob(f"*/{kind}.pt"):
            held = torch.load(file)  # of ZeRO 3 the elements alone, in one row
            tensor = held["param"] if isinstance(held, dict) else held
            out.setdefault(file.parent.name, {})[kind] = tensor.flatten()
    shutil.rmtree(copy)
    return out


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return one.dtype == other.dtype and torch.equal(one, other)
