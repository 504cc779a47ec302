"""The tensors of a step of torch.distributed.checkpoint, whole, as torch itself joins them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every one by its name."""
    flat: dict[str, torch.Tensor] = {}

    def walk(tree: object, at: str) -> None:
        if isinstance(tree, torch.Tensor):
            flat[at] = tree
        for key, value in tree.items() if isinstance(tree, dict) else ():
            walk(value, f"{at}.{key}" if at else str(key))

    walk(_load_state_dict_from_keys(storage_reader=dcp.FileSystemReader(folder)), "")
    return flat
