"""Drafts the page of a trainer that is not known: which files are a step, and what is in them.

A draft says what is there, by its form: what looks like an optimizer's state_dict() is one. Whether
the trainer takes a value from there, only its loader can say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.files.text_file import text
from ckptsurgeon.formats.described.description import FILE
from ckptsurgeon.formats.described.draft_contents import ITERATION, Contents, contents
from ckptsurgeon.formats.described.draft_names import Group, groups
from ckptsurgeon.formats.fields.constants import ODD, TORCH
from ckptsurgeon.formats.places.json_beside import is_json
from ckptsurgeon.plans.frozen import frozen
from ckptsurgeon.transaction.home import HOME

DEPTH = 3
"""Names below the run that lead to a file of a step, at most."""
MOST = 20_000
"""Names that are looked at."""
SHORT = 200
"""Characters of the longest text that is taken for a pointer."""
LAST = re.compile("last|latest|current|newest|resume", re.I)
"""In the name of a copy of the newest step. Any other copy, as of the best one, is nobody's to
replace."""
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
        raise UsageError(
            f"no file below {run} holds the state of an optimizer as torch saves it",
            next="-C RUN    RUN is the folder that holds the saved steps",
        )
    first = max(main, key=lambda group: (group.numbered, len(group.steps), -len(group.pattern)))
    if _counts_otherwise(first, read):
        read = {first.by_its_contents(): read[first]}
        (first,) = read
    page: dict[str, Any] = {"name": run.resolve().name}
    if not first.numbered:
        page |= _number(first, read[first], unsure)
    page["files"] = {}
    for group in sorted(read, key=lambda group: group is not first):
        if not read[group].keys or group.numbered != first.numbered:
            continue
        if group.steps & first.steps:
            content = read[group].page(group.last, optional=not group.steps >= first.steps)
            page["files"][group.pattern] = content
        else:
            unsure.append(f"{group.pattern} has no step of {first.pattern}, and is left out")
    if first.numbered:
        unnumbered = [group.pattern for group in main if not group.numbered]
        if last := [name for name in unnumbered if LAST.search(name)]:
            page["last"] = last
            unsure.append(f"does a restart load {', '.join(last)}? If not, leave out `last`")
        others = [name for name in unnumbered if name not in last]
        unsure += [
            f"{name} is of no step: if a restart loads it, it is a `last`" for name in others
        ]
    page |= _pointer(run, first, unsure)
    if "pointer" not in page and "last" not in page:
        unsure.append("there is no pointer: a restart is taken to load the highest step")
        if "{step}" in first.pattern.partition("/")[0]:
            unsure.append(
                "does the trainer take each name in this folder for a step? Then draft from the "
                f"folder above: {HOME} lies where the page begins"
            )
    return Draft(page, unsure)


def _counts_otherwise(group: Group, read: Mapping[Group, Contents]) -> bool:
    """Whether the files, which are all of a step, hold another step than the number in their name,
    which nothing calls the step: that of an epoch. A folder may hold more of a step, and keeps its
    number."""
    alone = [each for each, content in read.items() if content.keys] == [group]
    if not alone or "{step}" not in group.pattern.rpartition("/")[2] or group.is_called_step:
        return False
    inside = [value for field, _, value in read[group].counters if field == ITERATION]
    return bool(inside) and all(abs(value - group.last) > 1 for value in inside)


def saves(run: Path) -> Iterator[Path]:
    """What may be of a step by its name, below `run`: files of torch.save or JSON, and folders of
    torch.distributed.checkpoint or of a DeepSpeed engine, with the JSON in them."""
    left = MOST
    todo = [(run, 0)]
    while todo:
        folder, depth = todo.pop()
        for path in _listed(folder):
            left -= 1
            if left < 0:
                return
            if path.name == HOME:
                continue
            if path.is_dir() and not path.is_symlink():
                if _loader(path):
                    yield path
                    yield from (each for each in _listed(path) if is_json(each) and each.is_file())
                elif depth + 1 < DEPTH:
                    todo.append((path, depth + 1))
            elif (path.suffix in TORCH or is_json(path)) and path.is_file():
                yield path


def _loader(folder: Path) -> str:
    if (folder / ".metadata").is_file():
        return "dcp"
    return "deepspeed" if any(folder.glob("*_model_states.pt")) else ""


def _read(path: Path, unsure: list[str]) -> Contents:
    """What is in a file or a folder; nothing, said in `unsure`, where torch did not save it."""
    try:
        return contents(path, _loader(path) if path.is_dir() else "")
    except (SurgeryError, OSError, *ODD):
        if is_json(path):  # of which most are nobody's state
            return Contents({})
        unsure.append(f"{path.name} can't be read as torch saves it, and is left out")
        return Contents({})


def _number(group: Group, content: Contents, unsure: list[str]) -> dict[str, Any]:
    """Where the step is that no name has."""
    counters = [keys for field, keys, _ in content.counters if field == ITERATION]
    if not counters:
        raise UsageError(
            f"{group.newest} has no step in its name, and none under a key that is called so",
            next=f"--format torch:{group.pattern}=KEYS    edits it as step 0: docs/described.md",
        )
    if len(counters) > 1:
        several = ", ".join(".".join(map(str, keys)) for keys in counters)
        unsure.append(f"`number` leads to the step: which of {several} is it?")
    return {"number": list(counters[0])}


def _pointer(run: Path, group: Group, unsure: list[str]) -> dict[str, Any]:
    """A short text in the run that names a saved step by its number, by its name, or by a file with
    what was measured in its name."""
    for path in _listed(run):
        if path.suffix in NO_POINTER or not path.is_file() or path.suffix in TORCH:
            continue
        if path.stat().st_size > SHORT:
            continue
        said = text(path) or ""
        names = [file.name for file in group.files if "*" in group.pattern and file.name in said]
        if names:
            longest = max(names, key=len)
            unsure.append(f"does a restart load what {path.name} names? If not, omit `pointer`")
            return {"pointer": {"file": path.name, "text": said.replace(longest, FILE, 1)}}
        if pattern := group.named_in(said):
            return {"pointer": {"file": path.name, "text": pattern}}
    return {}


def _listed(folder: Path) -> Collection[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return ()
