"""What is in a file or a folder of a step, told by its form: optimizers, counters, weights …"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import json_text, plain_yaml
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.files.archives.sniff import begins_as_text
from ckptsurgeon.files.dcp import Saved
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.formats.described.description import ANY, KeyPath
from ckptsurgeon.formats.fields.understood import is_count
from ckptsurgeon.formats.places.json_beside import is_json
from ckptsurgeon.plans.frozen import frozen

DEEP = 5
"""Keys that lead to what is looked for, at most."""
WIDE = 2_000
"""Items of one dict or list that are looked at."""
SCHEDULE = "schedulers"
KINDS = ("optimizers", SCHEDULE, "scalers", "weights")
ITERATION, EPOCH = "iteration", "epoch"
COUNTERS = {
    ITERATION: re.compile(
        r"_?(global_|cur(rent)?_|train_|optimizer_)?(step|iter(ation)?)(s|_num|_nr|_idx|_count)?|num_updates|num_steps\w*",
        re.I,
    ),
    "consumed_samples": re.compile(r"(consumed|total|num)_(train_)?samples|samples_seen", re.I),
    "tokens": re.compile(r"((consumed|total|num)_)?tokens(_seen)?", re.I),
    EPOCH: re.compile(r"(cur(rent)?_|last_)?epoch(_idx|_num)?|epochs_(run|done|completed)", re.I),
}
"""What a counter is called, by the field that it is."""
UPDATES = re.compile(r"(global|optimizer)_step|num_updates")
"""Which of several counters goes on from epoch to epoch."""
SCHEDULED = re.compile(r"(.*_)?sched(uler?)?s?(_state(_dict)?)?", re.I)
"""What the state of a scheduler is called."""
WEIGHTS = re.compile(r"(.*_)?(model|module|network|net|weights|params)(_state(_dict)?)?|state_dict")


@frozen
class Contents:
    """What a page says under the path of a file or folder, by its keys, and the counters, which
    count there only where their values are right: field, key path, value."""

    keys: Mapping[str, Any]
    counters: Sequence[tuple[str, KeyPath, int]] = ()

    @property
    def is_main(self) -> bool:
        """Whether there is an optimizer: a step without one is no use to a trainer."""
        return bool(self.keys.get("optimizers")) or self.keys.get("loader") == "deepspeed"

    def page(self, step: int, *, optional: bool) -> dict[str, Any]:
        """As plain data, with the counters that say `step` or one beside it; all that could, where
        no name has the step (-1). Others are named, whatever they say."""
        fields: dict[str, list[list[Any]]] = {}
        for field, keys, value in self.counters:
            if field == EPOCH:  # which no page has a word for
                continue
            if field != ITERATION or step < 0 or abs(value - step) <= 1:
                fields.setdefault(field, []).append(list(keys))
        out = dict(self.keys) | ({"fields": fields} if fields else {})
        return out | ({"optional": True} if optional else {})


def contents(path: Path, loader: str) -> Contents:
    """What is in this file or folder. Raises SurgeryError, OSError."""
    if loader == "deepspeed":
        return Contents({"loader": loader})
    if loader == "dcp":
        return _values(Saved.open(path))
    tree = _tree(path)
    found: dict[str, list[list[Any]]] = {}
    counters = []
    for keys, kind, value in _kinds(tree, ()):
        if kind in COUNTERS:
            counters.append((kind, keys, value))
        elif list(keys) not in found.setdefault(kind, []):
            found[kind].append(list(keys))
    if is_json(path) and "schedulers" not in found:  # a config has steps and rates, too
        own = [each for each in counters if len(each[1]) == 1] if _is_trainers(tree) else []
        return Contents({}, own)
    return Contents({kind: found[kind] for kind in KINDS if kind in found}, counters)


def _is_trainers(tree: Any) -> bool:
    """Whether it is `trainer_state.json` of transformers: its step is in the name of the folder,
    but for the one that Ray Train names by the time."""
    return isinstance(tree, Mapping) and {"global_step", "log_history"} <= set(tree)


def is_fastai(path: Path) -> bool:
    """Whether `learn.save` of fastai wrote it, with its optimizer: state and hypers, as lists."""
    try:
        opt = _tree(path).get("opt")
    except (SurgeryError, OSError, AttributeError):
        return False
    return isinstance(opt, Mapping) and {"state", "hypers"} <= set(opt)


def is_param_groups(path: Path) -> bool:
    """Whether it is the JSON of an optimizer's param groups alone."""
    try:
        groups = json_text.read(path) if is_json(path) else None
    except (SurgeryError, OSError):
        return False
    each = groups if isinstance(groups, list) else []
    return bool(each) and all(isinstance(g, Mapping) and {"params", "lr"} <= set(g) for g in each)


def _tree(path: Path) -> Any:
    if is_json(path):
        return json_text.read(path)
    if begins_as_text(path):
        return plain_yaml.read(path)  # whatever it is called, as SpeechBrain's brain.ckpt
    archive = Archive.open(path)
    with archive.reading():
        return archive.tree()


def _kinds(value: Any, keys: KeyPath) -> Iterator[tuple[KeyPath, str, Any]]:
    """The key path of each thing that is recognized, what it is, and it itself."""
    if kind := _kind(value, keys):
        yield keys, kind, value
        return
    inner = list(_inner(value, keys)) if len(keys) < DEEP else []
    if _is_unknown_schedule(value, keys) and not any(kind == SCHEDULE for _, kind, _ in inner):
        yield keys, SCHEDULE, value
        return
    yield from inner


def _inner(value: Any, keys: KeyPath) -> Iterator[tuple[KeyPath, str, Any]]:
    if isinstance(value, Mapping):
        for key, item in list(value.items())[:WIDE]:
            if isinstance(key, (str, int)) and not isinstance(key, bool):
                yield from _kinds(item, (*keys, key))
    elif isinstance(value, (list, tuple)):
        for item in list(value)[:WIDE]:
            yield from _kinds(item, (*keys, ANY))


def _is_unknown_schedule(value: Any, keys: KeyPath) -> bool:
    """Whether it is called a scheduler and holds numbers: whatever class it is of, it may make the
    rate, and so nobody may take a new one for set."""
    named = next((str(key) for key in reversed(keys) if key != ANY), "")
    numbers = isinstance(value, Mapping) and any(
        isinstance(n, (int, float)) for n in value.values()
    )
    return numbers and SCHEDULED.fullmatch(named) is not None


def _kind(value: Any, keys: KeyPath) -> str:
    """By its form; a counter and weights by their name, too."""
    name = str(keys[-1]) if keys else ""
    if is_count(value):
        return next((field for field, word in COUNTERS.items() if word.fullmatch(name)), "")
    if not isinstance(value, Mapping):
        return ""
    if "param_groups" in value and "state" in value:
        return "optimizers"
    if {"event_index", "param_name"} <= set(value):  # ignite's; one of torch inside of it is late
        return SCHEDULE
    if "last_epoch" in value and {"_last_lr", "base_lrs", "_step_count"} & set(value):
        return SCHEDULE
    if {"scale", "growth_factor"} <= set(value):
        return "scalers"
    tensors = [item for item in value.values() if isinstance(item, Tensor)]
    if tensors and len(tensors) == len(value) and (not keys or WEIGHTS.fullmatch(name)):
        return "weights"
    return ""


def _values(saved: Saved) -> Contents:
    """Of a folder of torch.distributed.checkpoint, by the names of its values."""
    names = list(saved.items)
    optimizers = _before(names, r"\.(state|param_groups)\..+")
    others = [name for name in names if not name.startswith(_below(optimizers))]
    schedulers = _schedulers(saved, others)
    others = [name for name in others if not name.startswith(_below(schedulers))]
    weights = [each for name in others if (each := _called(name, WEIGHTS))]
    counters = []
    for name in others:
        last = name.rpartition(".")[2]
        for field in (field for field, word in COUNTERS.items() if word.fullmatch(last)):
            if is_count(value := saved.value(name)):
                counters.append((field, tuple(name.split(".")), value))
    found = {"optimizers": optimizers, "schedulers": schedulers, "weights": weights}
    keys = {key: [each.split(".") for each in dict.fromkeys(of)] for key, of in found.items()}
    return Contents({"loader": "dcp", **{key: of for key, of in keys.items() if of}}, counters)


def _schedulers(saved: Saved, names: Sequence[str]) -> list[str]:
    """What begins the names of each scheduler: of one of torch, without those that are parts of it,
    and of what is called a scheduler and holds numbers, of whatever class it is."""
    found = _before(names, r"\.last_epoch")
    found = [each for each in found if not each.startswith(_below(found))]
    for name in names:
        called = f"{_called(name, SCHEDULED)}."
        known = called == "." or any(each.startswith(called) for each in _below(found))
        if known or saved.items[name].is_tensor:
            continue
        if isinstance(saved.value(name), (int, float)):
            found.append(called[:-1])
    return found


def _below(beginnings: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{each}." for each in beginnings)


def _called(name: str, word: re.Pattern[str]) -> str:
    """What begins the name of a value, with the first part before the last that is called so."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts[:-1]) if word.fullmatch(part)), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _before(names: Sequence[str], rest: str) -> list[str]:
    """What begins the names that end so, each once."""
    found = (re.fullmatch(rf"(.+?){rest}", name) for name in names)
    return list(dict.fromkeys(match[1] for match in found if match))
