"""Drafts the page of a trainer that is not known: which files are a step, and what is in them.

A draft says what is there, by its form: what looks like an optimizer's state_dict() is one. Whether
the trainer takes a value from there, only its loader can say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.archives.sniff import begins_as_torch
from ckptsurgeon.files.dcp import METADATA
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats.described.description import FILE, KeyPath
from ckptsurgeon.formats.described.draft_contents import (
    EPOCH,
    ITERATION,
    UPDATES,
    Contents,
    contents,
    is_fastai,
    is_param_groups,
)
from ckptsurgeon.formats.described.draft_names import DIGITS, Group, groups
from ckptsurgeon.formats.described.file_pattern import listed_in
from ckptsurgeon.formats.described.foreign import foreign
from ckptsurgeon.formats.described.ray_list import NAME as RAY
from ckptsurgeon.formats.fields.constants import ODD, TORCH
from ckptsurgeon.formats.places.json_beside import is_json
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.transaction.home import HOME

DEPTH = 6
"""Names below the run that lead to a file of a step, at most: a step may have a folder for each
kind of its files, and in that one for each kind of rank."""
MOST = 20_000
"""Names that are looked at."""
SNIFFED = 1_000
"""Files that are looked into, as their names don't say whether torch saved them."""
SHORT = 200
"""Characters of the longest text that is taken for a pointer."""
NO_POINTER = (".yaml", ".yml", ".json", ".jsonl", ".csv", ".log", ".py", ".md", ".sh")


@frozen
class Draft:
    """The page as plain data, and what a person must decide or look at, a sentence each."""

    page: Mapping[str, Any]
    unsure: Sequence[str]


def draft(run: Path) -> Draft:
    """Read the newest file of each kind below `run`. Raises UsageError where none of them has the
    state of an optimizer."""
    unsure: list[str] = []
    read = {group: _read(group.newest, unsure) for group in groups(run, saves(run))}
    main = [group for group, content in read.items() if content.is_main]
    if not main:
        if own := next((group.newest for group in read if is_fastai(group.newest)), None):
            raise UsageError(
                f"{own} holds an optimizer of fastai's own, which is not edited here",
                next="learn.load(FILE), and give fit or fit_one_cycle the lr and wd: they make "
                "both anew at each start",
            )
        if beside := next((group.newest for group in read if is_param_groups(group.newest)), None):
            raise UsageError(
                f"{beside} holds the param groups of an optimizer, and no torch file its states",
                next="docs/described.md, `groups`    a page by hand, as where they are in "
                "safetensors; those of LeRobot are known in checkpoints/<step>/, but for those of "
                "multi_adam",
            )
        if refusal := foreign(run):
            raise refusal
        raise UsageError(
            f"no file below {run} holds the state of an optimizer as torch saves it",
            next="-C RUN    RUN is the folder that holds the saved steps",
        )
    first = max(main, key=_as_step)
    if _counts_otherwise(first, read):
        content = read.pop(first)
        first = first.by_its_contents()
        read = {first: content, **read}
        main = [first, *(group for group in main if group in read)]
    page: dict[str, Any] = {"name": run.resolve().name}
    last = [group for group in main if not group.numbered and group.is_last and group is not first]
    page |= _number(first, read, bool(last), unsure)
    page["files"] = {}
    for group in sorted(read, key=lambda group: group is not first):
        if not read[group].keys or group.numbered != first.numbered or group in last:
            continue
        if not first.numbered and group is not first and not _together(group, first, page):
            unsure.append(f"{group.pattern} is left out: its name says no step")
        elif group.steps & first.steps:
            rarer = not group.steps >= first.steps or len(group.files) < len(first.files)
            said = read[group].page(group.last, optional=rarer)
            loaded = any("loader" in each for each in page["files"].values())
            if loaded and "loader" in said:
                page["files"] |= _further(group.pattern, said, unsure)
            else:
                page["files"][group.pattern] = said
        else:
            whole = (
                "; a restart may load it: `*` and `number` describe both" if group in main else ""
            )
            unsure.append(f"{group.pattern} has no step of {first.pattern}, and is left out{whole}")
    if last:
        names = [group.pattern for group in last]
        page["last"] = names
        unsure.append(f"does a restart load {', '.join(names)}? If not, leave out `last`")
    if first.numbered:
        unsure += [
            f"{group.pattern} is of no step: if a restart loads it, it is a `last`"
            for group in main
            if not group.numbered and group not in last
        ]
    page |= _pointer(run, first, unsure)
    above = {each for path in first.files for each in path.parents if each.is_relative_to(run)}
    if any(disk.is_file(each / RAY) for each in above):
        unsure.append(f"Ray Train resumes by {RAY}, which is led to the step without a `pointer`")
    elif "pointer" not in page and "last" not in page:
        unsure.append("there is no pointer: a restart is taken to load the highest step")
        if "{step}" in first.pattern.partition("/")[0]:
            unsure.append(
                "does the trainer take each name in this folder for a step? Then draft from the "
                f"folder above: {HOME} lies where the page begins"
            )
    return Draft(page, unsure)


def _further(pattern: str, said: Mapping[str, Any], unsure: list[str]) -> dict[str, Any]:
    """A second folder of a loader, of which a page reads weights alone: it goes with its step."""
    if said["loader"] == "dcp" and "weights" in said and "optimizers" not in said:
        kept = ("loader", "weights", "optional")
        return {pattern: {key: said[key] for key in kept if key in said}}
    unsure.append(f"{pattern} is a copy, or has an optimizer of its own: nothing in it is edited")
    return {f"{pattern}/{METADATA}": {"optional": True}} if said["loader"] == "dcp" else {}


def _together(group: Group, first: Group, page: Mapping[str, Any]) -> bool:
    """Whether both are in the folder that a step is."""
    number = page.get("number")
    return isinstance(number, dict) and group.pattern.startswith(f"{number['folder']}/")


def _as_step(group: Group) -> tuple[bool, bool, int, int]:
    """What makes the files of a group the steps rather than those of another."""
    return group.numbered, not group.is_last, len(group.steps), -len(group.pattern)


def _counts_otherwise(group: Group, read: Mapping[Group, Contents]) -> bool:
    """Whether the files, which are all of a step, hold another step than the number in their name,
    which nothing calls the step: that of an epoch. A folder may hold more of a step, and keeps its
    number."""
    alone = [each for each, content in read.items() if content.keys and each.numbered] == [group]
    if not alone or "{step}" not in group.pattern.rpartition("/")[2] or group.is_called_step:
        return False
    inside = [value for field, _, value in read[group].counters if field == ITERATION]
    return bool(inside) and all(abs(value - group.last) > 1 for value in inside)


def saves(run: Path) -> Iterator[Path]:
    """What may be of a step by its name, below `run`: files of torch.save or JSON, and folders of
    torch.distributed.checkpoint or of a DeepSpeed engine, with the JSON in them."""
    left, sniffed = MOST, dict[tuple[Path, str], bool]()
    todo = deque([(run, 0)])
    while todo:
        folder, depth = todo.popleft()  # what lies deep is looked at last
        for path in listed_in(folder):
            left -= 1
            if left < 0:
                return
            if path.name == HOME:
                continue
            if disk.is_folder(path) and not disk.is_link(path):
                if _loader(path):
                    yield path
                    yield from (
                        each for each in listed_in(path) if is_json(each) and disk.is_file(each)
                    )
                elif depth + 1 < DEPTH:
                    todo.append((path, depth + 1))
            elif _saved(path, sniffed) and disk.is_file(path):
                yield path


def _saved(path: Path, sniffed: dict[tuple[Path, str], bool]) -> bool:
    """By its name; the first one of each other kind of name is looked into."""
    if path.name.endswith(TORCH) or is_json(path):
        return True
    kind = (path.parent, DIGITS.sub("#", path.name))
    if kind not in sniffed and len(sniffed) < SNIFFED:
        sniffed[kind] = begins_as_torch(path)
    return sniffed.get(kind, False)


def _loader(folder: Path) -> str:
    if disk.is_file(folder / ".metadata"):
        return "dcp"
    return "deepspeed" if any(disk.matching(folder, "*_model_states.pt")) else ""


def _read(path: Path, unsure: list[str]) -> Contents:
    """What is in a file or a folder; nothing, said in `unsure`, where torch did not save it."""
    try:
        return contents(path, _loader(path) if disk.is_folder(path) else "")
    except (SurgeryError, OSError, *ODD):
        if is_json(path):  # of which most are nobody's state
            return Contents({})
        unsure.append(f"{path.name} can't be read as torch saves it, and is left out")
        return Contents({})


def _number(
    group: Group, read: Mapping[Group, Contents], copied: bool, unsure: list[str]
) -> dict[str, Any]:
    """Where the step is that no name has, or not that of a copy."""
    content = read[group]
    if group.numbered:
        same = [keys for _, keys, value in _counters(content) if value == group.last]
        return {"number": list(same[0])} if copied and same else {}
    counters = [keys for _, keys, _ in _counters(content)]
    if not counters and (beside := _number_beside(group, read, unsure)):
        return {"number": beside}
    if not counters:
        raise UsageError(
            f"{group.newest} has no step in its name, and none under a key that is called so",
            next=f"--format torch:{group.pattern}=KEYS    edits it as step 0: docs/described.md",
        )
    if len(counters) > 1:
        _which(counters, unsure)
    folder, name = _of_step(group.pattern)
    if "*" in folder or "{" in folder:  # all that is in it leaves with the step
        return {"number": {"folder": folder, "file": name, "keys": list(counters[0])}}
    return {"number": list(counters[0])}


def _counters(content: Contents) -> list[tuple[str, KeyPath, int]]:
    """What counts updates, or epochs where nothing counts these: the least deep first."""
    for kind in (ITERATION, EPOCH):
        if found := [each for each in content.counters if each[0] == kind]:
            return sorted(found, key=lambda each: (len(each[1]), not _of_updates(each[1])))
    return []


def _of_updates(keys: KeyPath) -> bool:
    return UPDATES.fullmatch(str(keys[-1])) is not None


def _number_beside(
    group: Group, read: Mapping[Group, Contents], unsure: list[str]
) -> dict[str, Any]:
    """Where the step is in another file of the folder that the step is."""
    folder = group.pattern.rpartition("/")[0]
    for other, content in read.items():
        above, _, name = other.pattern.rpartition("/")
        if folder and above == folder and (found := _counters(content)):
            keys = [each for _, each, _ in found]
            if len(keys) > 1:
                _which(keys, unsure)
            above, name = _of_step(other.pattern)
            return {"folder": above, "file": name, "keys": list(keys[0])}
    return {}


def _of_step(pattern: str) -> tuple[str, str]:
    """The folder that a step is, and the file from there: `checkpoint_*/checkpoint/optimizer.pt`
    is of the first one, as what is called alike in each step is a part of it."""
    *folders, name = pattern.split("/")
    told = [i for i, each in enumerate(folders) if "*" in each or "{" in each]
    depth = told[-1] + 1 if told else len(folders)
    return "/".join(folders[:depth]), "/".join([*folders[depth:], name])


def _which(counters: Sequence[KeyPath], unsure: list[str]) -> None:
    several = ", ".join(".".join(map(str, keys)) for keys in counters)
    unsure.append(f"`number` leads to the step: which of {several} is it?")


def _pointer(run: Path, group: Group, unsure: list[str]) -> dict[str, Any]:
    """A short text in the run that names a saved step by its number, by its name, or by a file with
    what was measured in its name."""
    for path in listed_in(run):
        if path.suffix in NO_POINTER or not disk.is_file(path) or path.name.endswith(TORCH):
            continue
        if path.stat().st_size > SHORT:
            continue
        said = text(path) or ""
        measured = "*" in group.pattern.rpartition("/")[2]
        names = [file.name for file in group.files if measured and file.name in said]
        if names and "/" in said:  # a fork would be led to a file of this run
            unsure.append(f"{path.name} names a path: after a rollback, correct it")
        elif names:
            longest = max(names, key=len)
            unsure.append(f"does a restart load what {path.name} names? If not, omit `pointer`")
            return {"pointer": {"file": path.name, "text": said.replace(longest, FILE, 1)}}
        elif pattern := group.named_in(said):
            return {"pointer": {"file": path.name, "text": pattern}}
    return {}
