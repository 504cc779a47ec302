"""Weights that a step keeps a second time: an average of them (EMA), or what is really trained.

Which of the two a trainer goes on from is its own affair: Lightning's WeightAveraging puts the
average where the weights usually are. So a surgery on weights must not pass over the other copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.safetensors import SafetensorsFile
from ckptsurgeon.files.dcp import Values
from ckptsurgeon.files.pickles.tree import Object, Tensor
from ckptsurgeon.formats.capabilities import copies
from ckptsurgeon.formats.checkpoint import Checkpoint
from ckptsurgeon.formats.fields.constants import PICKLED, SAFE, TORCH
from ckptsurgeon.formats.fields.values import COUNTING, Located, Part
from ckptsurgeon.plans.edits import Key

TRAINED = "current_model_state"
"""Under this key Lightning's WeightAveraging keeps what is trained; `state_dict` is the average."""
OPTIMIZER = "optim"
"""In the name of a file or key: what lies there is an optimizer's, and judged by its own table."""


def second_copies(
    checkpoint: Checkpoint, parts: Collection[Part], files: Iterable[Path]
) -> Iterator[Located]:
    """File and key path of each dict that has tensors by the names of the weights, and of each list
    that has them by their shapes, where none of `parts` is; also in those `files` of the step that
    nothing was read of. A file that can't be read is passed over."""
    known: dict[Path, set[tuple[Key, ...]]] = {}
    for part in parts:
        known.setdefault(part.place.file, set()).add(part.place.path)
    names = {part.parameter for part in parts if part.kind in ("weights", "master")}
    shapes = Counter(p.place.value.size for p in parts if p.kind == "weights")
    skipped = {*copies(checkpoint), *(file for file in known if file.suffix == SAFE)}
    for file in dict.fromkeys([*checkpoint.trees, *checkpoint.archives, *files]):
        if file in skipped or OPTIMIZER in file.name:
            continue
        taken = known.get(file, set())
        for path in _repeats(_tree(checkpoint, file, taken), (), taken, names, shapes):
            yield file, path


def _tree(checkpoint: Checkpoint, file: Path, taken: Collection[tuple[Key, ...]]) -> Any:
    """What is in a file; of a folder of values the tensors that none of `taken` leads to."""
    tree = checkpoint.trees.get(file)
    if isinstance(tree, Values):
        parts, values = {path[0] for path in taken}, tree.saved.items.items()
        others = [n for n, items in values if items.is_tensor and n not in parts]
        return {name: tree[name] for name in others if OPTIMIZER not in name}
    if tree is not None:
        return tree
    archive: Archive | None = checkpoint.archives.get(file)
    try:
        if archive is None and file.suffix == SAFE:
            archive = SafetensorsFile.open(file)
        elif archive is None and file.name.endswith((*TORCH, PICKLED)):
            archive = Archive.open(file)
        return archive.tree() if archive else None
    except (DamagedFile, OSError):
        return None


def _repeats(
    tree: Any,
    at: tuple[Key, ...],
    taken: Collection[tuple[Key, ...]],
    names: Collection[str],
    shapes: Mapping[tuple[int, ...], int],
) -> Iterator[tuple[Key, ...]]:
    """The paths in `tree`, from `at` on."""
    if isinstance(tree, Object):
        tree = {**(tree.state if isinstance(tree.state, dict) else {}), **(tree.items or {})}
    items: list[tuple[Key, Any]] = list(
        tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        if isinstance(tree, (list, tuple)) else ()
    )  # fmt: skip
    free = [(k, v) for k, v in items if _is_free((*at, k), v, taken)]
    if isinstance(tree, Mapping):
        repeats = any(_named(str(key), names) for key, _ in free)
    else:
        repeats = _alike([value for _, value in free], shapes)
    if repeats:
        yield at
        return
    for key, value in items:
        if not (isinstance(key, str) and OPTIMIZER in key):
            yield from _repeats(value, (*at, key), taken, names, shapes)


def _is_free(path: tuple[Key, ...], value: Any, taken: Collection[tuple[Key, ...]]) -> bool:
    """Whether it is a tensor of numbers and no part; ZeRO 3 leaves empty ones instead."""
    tensor = isinstance(value, Tensor) and value.numel and value.dtype not in COUNTING
    return bool(tensor) and path not in taken


def _named(key: str, names: Collection[str]) -> bool:
    """Whether `key` is a parameter's name, or that of a wrapper around it or inside it."""
    tails = _tails(key)
    return any(tail in names for tail in tails) or (
        "." in key and any(name.endswith(f".{key}") for name in names)
    )


def _tails(key: str) -> list[str]:
    words = key.split(".")
    return [".".join(words[i:]) for i in range(len(words))]


def _alike(tensors: list[Tensor], shapes: Mapping[tuple[int, ...], int]) -> bool:
    """Whether they are half of the weights or more, by their shapes."""
    found = Counter(tensor.size for tensor in tensors)
    fits = all(count <= shapes.get(size, 0) for size, count in found.items())
    return bool(found) and fits and 2 * len(tensors) >= sum(shapes.values())
