"""Opens one saved step as its page says: torch files, a folder of values, or shards of an engine or
of Megatron-core."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.dcp import Saved, Values
from ckptsurgeon.formats.deepspeed.engine import Engine
from ckptsurgeon.formats.described.checkpoint import DescribedCheckpoint, expanded
from ckptsurgeon.formats.described.description import ANY, Content, Description, KeyPath
from ckptsurgeon.formats.described.engine import DescribedEngine
from ckptsurgeon.formats.described.megatron import DescribedMegatron
from ckptsurgeon.formats.described.sharded import (
    DescribedSharded,
    beginnings,
    optimizers,
    weights_of,
)
from ckptsurgeon.formats.fields.shard_files import read_shards
from ckptsurgeon.formats.fields.values import Located
from ckptsurgeon.formats.megatron.dist import COMMON, common_root
from ckptsurgeon.formats.places.json_beside import read_beside
from ckptsurgeon.hints import command

KEYS = ("optimizers", "groups", "schedulers", "scalers", "weights", "savers")


def opened(
    page: Description,
    path: Path,
    step: int,
    shards: Mapping[Path, Content],
    ranks: int,
    without: Collection[Path],
) -> DescribedCheckpoint | DescribedSharded | DescribedEngine | DescribedMegatron:
    """The step `step` at `path`: `shards` are its files, and the folder that a loader reads.
    Raises SurgeryError where nothing of what the page names is there."""
    named = {p: c for p, c in shards.items() if p not in without and c.paths()}
    inside = {p: c for p, c in named.items() if not c.loader}
    for folder, content in shards.items():
        if content.loader == "dcp" and content.paths():
            models = {p: c for p, c in named.items() if c.only_weights and p != folder}
            return _sharded(page, path, step, folder, content, inside, models)
        if content.loader == "deepspeed":
            return _engine(page, path, step, folder, content, without)
        if content.loader == "megatron":
            return _megatron(page, path, step, folder, content, without)
    trees, archives, texts = read_beside(inside, flattened(inside))
    located = {key: tuple(_located(trees, inside, key)) for key in KEYS}
    if not any(located.values()):
        raise _leads_nowhere(path, inside or shards)
    return DescribedCheckpoint(
        path=path,
        step=step,
        trees=trees,
        archives=archives,
        texts=texts,
        optimizers=located["optimizers"],
        groups_in=_groups_in(located),
        schedulers=located["schedulers"],
        scales=tuple((file, (*at, "scale")) for file, at in located["scalers"]),
        family=page.name,
        ranks=(max(1, ranks), 1),
        description=page,
        weights_at=located["weights"],
        counters=_counters(trees, inside),
        savers=located["savers"],
        nowhere=tuple(_nowhere(trees, inside)),
    )


def flattened(inside: Mapping[Path, Content]) -> list[Path]:
    """The files whose names are key paths, where they are safetensors: an optimizer is in them."""
    return [path for path, content in inside.items() if content.optimizers]


def _groups_in(located: Mapping[str, tuple[Located, ...]]) -> dict[Path, Located]:
    """By the file of each optimizer where its groups are: in another file of its folder."""
    by_folder = {item[0].parent: item for item in located["groups"]}
    found = ((file, by_folder.get(file.parent)) for file, _ in located["optimizers"])
    return {file: item for file, item in found if item is not None}


def _nowhere(trees: Mapping[Path, Any], inside: Mapping[Path, Content]) -> Iterator[str]:
    """Files without a scheduler where their page has one: there is not even an empty list."""
    for file, content in inside.items():
        parents = [path[: path.index(ANY)] if ANY in path else path for path in content.schedulers]
        if parents and not any(list(expanded(trees[file], path)) for path in parents):
            yield f"{file.name}: {', '.join('.'.join(map(str, path)) for path in parents)}"


def _sharded(
    page: Description,
    path: Path,
    step: int,
    folder: Path,
    content: Content,
    beside: Mapping[Path, Content],
    models: Mapping[Path, Content],
) -> DescribedSharded:
    """`models` are the folders of weights alone."""
    saved = Saved.open(folder)
    trees, archives, texts = read_beside(beside)
    located = {key: tuple(_located(trees, beside, key)) for key in KEYS}
    within = [name for keys in content.schedulers for name in beginnings(saved.items, keys)]
    counters = {name: list(places) for name, places in _counters(trees, beside).items()}
    for name, paths in content.fields.items():
        named = [value for keys in paths for value in beginnings(saved.items, keys, rest="")]
        counters[name] = [*counters.get(name, ()), *((saved.path, (value,)) for value in named)]
    first, *others = optimizers(saved, content.optimizers)
    own = (name for keys in content.weights for name in beginnings(saved.items, keys))
    weights: list[tuple[Saved | Path, str]] = [(saved, f"{name}.") for name in own]
    weights += (each for model, item in models.items() for each in weights_of(model, item.weights))
    folders = {
        each.path: each for each, _ in weights if isinstance(each, Saved) and each is not saved
    }
    return DescribedSharded(
        path=path,
        step=step,
        trees={**trees, **{each.path: Values(each) for each in (saved, *folders.values())}},
        archives=archives,
        texts=texts,
        saved=saved,
        models=tuple(folders.values()),
        trainer=page.name,
        prefix=first,
        further=tuple((saved, prefix) for prefix in others),
        options=page.options,
        schedulers=(*located["schedulers"], *((saved.path, (name,)) for name in within)),
        scales=tuple((file, (*at, "scale")) for file, at in located["scalers"]),
        description=page,
        counted_at={name: tuple(places) for name, places in counters.items()},
        savers=located["savers"],
        weights_in=tuple(weights),
    )


def _engine(
    page: Description,
    path: Path,
    step: int,
    folder: Path,
    content: Content,
    without: Collection[Path],
) -> DescribedEngine:
    """What the trainer loads itself is in the client state: in every model file."""
    inner = Engine(folder).open(folder, step, without)
    models = {file: content for file in inner.trees if file.name.endswith("_model_states.pt")}
    return DescribedEngine(
        path,
        step,
        inner.trees,
        inner.archives,
        schedulers=tuple(_located(inner.trees, models, "schedulers")),
        doubts=tuple(page.doubts()),
        savers=tuple(_located(inner.trees, models, "savers")),
    )


def _megatron(
    page: Description,
    path: Path,
    step: int,
    folder: Path,
    content: Content,
    without: Collection[Path],
) -> DescribedMegatron:
    """What the trainer keeps of its own is in the common state."""
    saved = Saved.open(folder)
    common = folder / COMMON
    beside = [common] if disk.is_file(common) and common not in without else []
    trees, archives = read_shards(beside)
    trees[saved.path] = Values(saved)
    roots = common_root(archives, saved)
    inside, base = {file: content for file, _ in roots}, next((keys for _, keys in roots), ())
    return DescribedMegatron(
        path,
        step,
        trees,
        archives,
        saved=saved,
        description=page,
        schedulers=tuple(_located(trees, inside, "schedulers", base)),
        counters=_counters(trees, inside, base),
        savers=tuple(_located(trees, inside, "savers", base)),
    )


def _leads_nowhere(folder: Path, inside: Mapping[Path, Content]) -> SurgeryError:
    if not inside:
        return SurgeryError(
            f"{folder} has no file that the description names",
            next=command("status", why="which steps are complete"),
        )
    file, content = next(iter(inside.items()))
    named = [".".join(map(str, path)) for path in content.paths()]
    return SurgeryError(
        f"{file.name} holds nothing that the description names: {', '.join(named)}",
        next="--format FORMAT    with the key paths of this file",
    )


def _located(
    trees: Mapping[Path, Any], inside: Mapping[Path, Content], key: str, base: KeyPath = ()
) -> Iterator[Located]:
    """Where the paths lead, each after `base`."""
    for file, content in inside.items():
        for path in getattr(content, key):
            yield from ((file, full) for full in expanded(trees[file], (*base, *path)))


def _counters(
    trees: Mapping[Path, Any], inside: Mapping[Path, Content], base: KeyPath = ()
) -> dict[str, tuple[Located, ...]]:
    """By name, each path after `base`."""
    out: dict[str, tuple[Located, ...]] = {}
    for file, content in inside.items():
        for name, paths in content.fields.items():
            full = (each for keys in paths for each in expanded(trees[file], (*base, *keys)))
            found = ((file, path) for path in full)
            out[name] = (*out.get(name, ()), *found)
    return out
