"""Checkpoints of torch with one value of a kind that nobody here knows, as strangers save them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Keys = tuple[Any, ...]
HIDDEN = 4


class Stranger:
    """Somebody's own class."""

    def __init__(self) -> None:
        self.value = 1.0


STRANGER = f"{Stranger.__module__}.Stranger"
ODD: Mapping[str, Any] = {
    "none": None,
    "a tensor": torch.tensor([1.0, 2.0]),
    "nested": {"view 0": {"value": torch.ones(2)}},
    "a class": Stranger(),
    "a text": "auto",
    "a list": [0.1, 0.2],
    "an array": np.array([0.1, 0.2]),
    "a complex number": 1j,
    "true": True,
    "below 0": -1.0,
}
IN_JSON = ("none", "a text", "a list", "true", "below 0")
"""Those that JSON can say."""
OF_EVERY_RANK = ("none", "a text", "a list", "true", "below 0")
"""Those that may be what a field has: shards that have others contradict each other."""
BESIDE = ("model", "args", "rng_state", "rerun_state_machine", "checkpoint_version")
"""Keys of a file that are no state of an optimizer, a scheduler or a trainer."""


def places(tree: Any, path: Keys = ()) -> Iterator[Keys]:
    """The path of every value that is no container, and of every container but the whole."""
    items: Any = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    for key, value in items:
        if path or key not in BESIDE:
            yield (*path, key)
            yield from places(value, (*path, key))


def with_odd(tree: Any, path: Keys, value: Any) -> Any:
    """The same with `value` at `path`."""
    if not path:
        return value
    if isinstance(tree, tuple):
        items = list(tree)
        items[path[0]] = with_odd(items[path[0]], path[1:], value)
        return tuple(items)
    tree[path[0]] = with_odd(tree[path[0]], path[1:], value)
    return tree


def read(file: Path) -> Any:
    """What the file holds, as its trainer reads it."""
    if file.suffix == ".json":
        return json.loads(file.read_text())
    return torch.load(file, weights_only=False)


def make_odd(file: Path, path: Keys, kind: str) -> None:
    """Write the file with an odd value at `path`."""
    tree = read(file)
    if file.suffix == ".json":
        file.write_text(json.dumps(with_odd(tree, path, ODD[kind])))
        return
    torch.save(with_odd(tree, path, ODD[kind]), file)


def one_file(root: Path) -> Path:
    """`ckpt_{step}.pt` with an AdamW whose groups remember their initial rate, as nanoGPT's kin."""
    root.mkdir(parents=True)
    model = torch.nn.Linear(HIDDEN, 2)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 7):
        for group in adam.param_groups:
            group["initial_lr"] = 2e-3
        model(torch.rand(3, HIDDEN)).pow(2).sum().backward()
        adam.step()
        if step % 2 == 0:
            state = {"model": model.state_dict(), "optimizer": adam.state_dict(), "step": step}
            torch.save(state, root / f"ckpt_{step}.pt")
    return root
