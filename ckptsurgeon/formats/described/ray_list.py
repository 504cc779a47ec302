"""The list of a run's checkpoints that Ray Train keeps in the folder of the run, and resumes by.

A start takes the checkpoint that is `latest_checkpoint_result`, and ends where one that the list
names is not there. Source: ray 2.60.0, `CheckpointManager` of
`train/v2/_internal/execution/checkpoint/checkpoint_manager.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files import json_text
from ckptsurgeon.files.one_look import once
from ckptsurgeon.formats.described.description import ANY_FOLDERS
from ckptsurgeon.formats.described.steps import DescribedSteps
from ckptsurgeon.hints import command

NAME = "checkpoint_manager_snapshot.json"
RESULTS, INDICES = "checkpoint_results", "checkpoint_report_indices"
LATEST = "latest_checkpoint_result"
BESIDE = {RESULTS: INDICES, "pending_training_results": "pending_validation_specs"}
"""A list of checkpoints → the list that has something of each of them, in the same order."""
NAMES = "_checkpoint_dir_names"
"""How the key of a list ends that has the names of their folders alone."""


class Listed(DescribedSteps):
    """The steps of one page, and the lists that name them."""

    @once
    def lists(self, run: Path) -> list[Path]:
        """Each beside the folders that are steps, or above these."""
        own = (path for step in self._found(run) for path in self._own(run, step))
        above = {parent for path in own for parent in path.parents if parent.is_relative_to(run)}
        return [path for path in sorted(each / NAME for each in above) if disk.is_file(path)]

    def named_in(self, file: Path) -> int | None:
        """The step that a list would have a start take; None where it names a folder that is not
        there, at which a start ends."""
        run = next(
            (each for each in file.parents[: 1 + ANY_FOLDERS] if file in self.lists(each)), None
        )
        name = latest(file)
        if not all(disk.exists(file.parent / each) for each in names(file)):
            return None
        steps = {step for step, own in self._names(run, file) if own == name} if run else set()
        return steps.pop() if len(steps) == 1 else None

    def relisted(self, run: Path, step: int) -> dict[Path, str]:
        """Every list that names the step, as of the time when it was the latest."""
        out: dict[Path, str] = {}
        for file in self.lists(run):
            named = self._names(run, file)
            later = {name for each, name in named if each > step}
            own = [name for each, name in named if each == step]
            if not own:
                continue

            def stays(name: str, folder: Path = file.parent, gone: set[str] = later) -> bool:
                return name not in gone and disk.exists(folder / name)

            out[file] = led_to(file, own, stays)
        return out

    def _names(self, run: Path, file: Path) -> list[tuple[int, str]]:
        """The steps beside a list, each with the name of its folder there."""
        owned = [(step, path) for step in self._found(run) for path in self._own(run, step)]
        return [
            (step, path.relative_to(file.parent).parts[0])
            for step, path in owned
            if path.is_relative_to(file.parent)
        ]


def latest(file: Path) -> str:
    """The name of the folder that a start takes; "" where the list has none, and where it can't be
    read."""
    try:
        return _name(json_text.mapping(file).get(LATEST))
    except (SurgeryError, OSError):
        return ""


def names(file: Path) -> list[str]:
    """The folders that a start asks for; none where the list can't be read."""
    try:
        return [_name(each) for each in _items(json_text.mapping(file), RESULTS)]
    except (SurgeryError, OSError):
        return []


def led_to(file: Path, folders: Sequence[str], stays: Callable[[str], bool]) -> str:
    """The list whose latest checkpoint is one of these `folders`, without those of
    which none `stays`. Raises SurgeryError where it has none of them."""
    held = json_text.mapping(file)
    order = dict(zip(map(_name, _items(held, RESULTS)), _items(held, INDICES), strict=False))
    known = [name for name in folders if name in order]
    if not known:
        raise SurgeryError(
            f"{file.name}, by which Ray Train resumes, does not know {' or '.join(folders)}",
            next=command("status", why="the steps that are saved"),
        )
    now = _name(held.get(LATEST))
    target = now if now in known else max(known, key=lambda name: order[name])
    return _without(held, target, stays)


def alone(said: str) -> str:
    """A list that says so with its latest checkpoint and no other; any other text as it is."""
    try:
        held = json.loads(said)
    except ValueError:
        return said
    name = _name(held.get(LATEST)) if isinstance(held, dict) else ""
    return _without(held, name, lambda other: other == name) if name else said


def _without(held: Mapping[str, Any], target: str, stays: Callable[[str], bool]) -> str:
    out = dict(held)
    out[LATEST] = next(each for each in _items(held, RESULTS) if _name(each) == target)
    for key, beside in BESIDE.items():
        kept = [i for i, each in enumerate(_items(held, key)) if stays(_name(each))]
        for one in (key, beside):
            if one in held:
                out[one] = [each for i, each in enumerate(_items(held, one)) if i in kept]
    for key in held:
        if key.endswith(NAMES):
            out[key] = [name for name in _items(held, key) if stays(name)]
    return json.dumps(out, separators=(",", ":"), ensure_ascii=False)


def _items(held: Mapping[str, Any], key: str) -> list[Any]:
    value = held.get(key)
    return value if isinstance(value, list) else []


def _name(result: Any) -> str:
    """The folder of one checkpoint."""
    name = result.get("checkpoint_dir_name") if isinstance(result, dict) else None
    return name if isinstance(name, str) else ""
