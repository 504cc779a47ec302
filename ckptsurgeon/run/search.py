"""Which folder is the run that a path lies in, as git finds a repository. Reads only."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.formats import Format
from ckptsurgeon.formats.detect import SIGNS, detect, is_run, named, nameless
from ckptsurgeon.formats.fields.constants import TORCH
from ckptsurgeon.hints import Hint, again, command
from ckptsurgeon.remote import reads
from ckptsurgeon.run.only_logs import Logs
from ckptsurgeon.transaction.home import HOME, has_receipts

SETTINGS = "ckptsurgeon.yaml"
"""What the user says about a run: its name, its log folders, how its trainer is started."""
SHOWN = (
    "name: TEXT, format: NAME or FILE, tensorboard: [DIR], logs: [FILE], tracker_runs: [RUN], "
    "log_offset: NUMBER, relaunch: {command: [ARG]}"
)
"""Its keys, as they are written."""
DESCRIBED = "describes a layout that is not known: docs/described.md"
DRAFTED = "drafts a page that describes what lies there"
STEP = re.compile(r"([a-z]*[-_]?step[-_]?|iter[-_]?|[0-9]{2})[0-9]{1,18}", re.IGNORECASE)
"""What a folder is called that looks like a saved step, to whoever wrote the trainer."""
NUMBERED = re.compile(r"([^0-9]*)[0-9]{1,18}(\.[a-z]\w*)+", re.IGNORECASE)
"""A file with one number in its name, before its suffixes."""
WIDTH = 100
"""Folders that are looked into for a run below one that is none."""


def nearest(here: Path, format: str = "") -> tuple[Path, Format, Mapping[str, Any]] | None:
    """The root, the format and the settings of the run at `here` or in the nearest folder above.

    With `format` (see `detect.named`), or a `format` in the settings, the nearest one that this
    recognizes. Nothing at or under `.ckptsurgeon` is a run."""
    top = reads.top()
    for folder in (here, *here.parents):
        if top is not None and folder in top.parents:
            break
        if HOME in folder.parts:
            continue
        file = folder / SETTINGS
        settings = _settings(file) if disk.is_file(file) else {}
        given = format or _own(settings, folder)
        found = _recognized(folder, given) if given else detect(folder)
        if found is not None:
            return folder, found, settings
        if not format and has_receipts(folder):
            return folder, Logs(), {}
    return None


def refuse_none(here: Path, format: str) -> NoReturn:
    """Raise UsageError for `here`, which no run is around, and name the runs below it."""
    if sentence := nameless(here, format):
        if not format:  # the file of a trainer that no page is of: a draft helps more
            _refuse_unknown_layout(here)
        raise UsageError(
            sentence, next="--format FILE    a page with the key path of its step: `number`"
        )
    if format:
        _refuse_other_files(here, format)
        raise UsageError(
            f"no file in {here} or above matches {format}",
            next="--format FORMAT    with paths from the run's folder",
        )
    below = _below(here)
    if not below:
        _refuse_unknown_layout(here.parent if STEP.fullmatch(here.name) else here)
    hints = [command("status", run=folder) for folder in below[:3]] or [
        command("status", run="RUN", why="RUN is the folder that holds the checkpoints")
    ]
    from ckptsurgeon.formats.described.draft import saves
    from ckptsurgeon.formats.described.foreign import foreign

    if not below and any(True for _ in saves(here)):
        hints.append(command("draft-format", why=DRAFTED))
    elif not below and (refusal := foreign(here)):
        raise refusal
    raise UsageError(f"no training run in {here} or above ({SIGNS})", next=hints)


def _refuse_other_files(here: Path, format: str) -> None:
    """Raise UsageError where the files of `torch:PATH=KEYS` are there, and torch did not save
    them."""
    from ckptsurgeon.formats.described.layout import Described

    page = named(format)
    if not format.startswith("torch:") or not isinstance(page, Described):
        return
    for pattern in page.description.files:
        for file, _ in pattern.matches(here)[:1]:
            raise UsageError(
                f"{file} is no file of torch.save",
                next=f"--format FILE.yaml    {DESCRIBED}",
            )


def _refuse_unknown_layout(here: Path) -> None:
    """Raise UsageError for a folder that looks like a saved step, by its name and a file in it."""
    inside = _inside(here)[:WIDTH]
    for file in inside:
        if file.name.endswith(TORCH) and NUMBERED.fullmatch(file.name) and disk.is_file(file):
            raise UsageError(
                f"{file} may be a saved step, in no layout that is known here",
                next=command("draft-format", run=here, why=DRAFTED),
            )
    for folder in inside:
        if not STEP.fullmatch(folder.name) or not _is_folder(folder):
            continue
        if any(path.name.endswith(TORCH) for path in _inside(folder)):
            raise UsageError(
                f"{folder} is a saved step in no layout that is known here",
                next=command("draft-format", run=here, why=DRAFTED),
            )


def meant(start: Path) -> list[Hint]:
    """What helps where `start` is no directory: one beside it with nearly that name, or how a run
    is named."""
    beside = start.absolute().parent
    names = [path.name for path in _inside(beside) if _is_folder(path)]
    near = difflib.get_close_matches(start.name, names, n=1)
    return [again(swapped=(start, start.with_name(name))) for name in near] or [
        command("status", run="RUN", why="RUN is the folder that holds the checkpoints")
    ]


def _settings(file: Path) -> dict[str, Any]:
    data = plain_yaml.read(file)
    known = (
        "name", "tensorboard", "logs", "tracker_runs", "log_offset", "relaunch", "format",
        "optimizer",
    )  # fmt: skip
    for key in data:
        if key not in known:
            raise unknown_key(key, known, str(file))
    events, logs = data.get("tensorboard", []), data.get("logs", [])
    runs = data.get("tracker_runs", [])
    kinds = {
        "name": ("a text", _is_plain(data.get("name", ""))),
        "format": ("a text", _is_plain(data.get("format", ""))),
        "optimizer": ("a text", _is_plain(data.get("optimizer") or "")),
        "tensorboard": ("a folder or a list of folders",
                        all(map(_is_plain, events if isinstance(events, list) else [events]))),
        "logs": ("a file or a list of files",
                 all(map(_is_plain, logs if isinstance(logs, list) else [logs]))),
        "tracker_runs": ("a name or a list of names",
                         all(map(_is_plain, runs if isinstance(runs, list) else [runs]))),
        "log_offset": ("a whole number", type(data.get("log_offset", 0)) is int),
        "relaunch": ("a mapping", isinstance(data.get("relaunch", {}), dict)),
    }  # fmt: skip
    for key, (kind, fits) in kinds.items():
        if not fits:
            raise UsageError(f"{file}: `{key}` is not {kind}", next=f"ckptsurgeon.yaml: {SHOWN}")
    return data


def _is_plain(value: Any) -> bool:
    """A text that can name a file, or a number as YAML reads one."""
    return isinstance(value, (str, int, float)) and "\0" not in str(value)


def _own(settings: Mapping[str, Any], folder: Path) -> str:
    """The format that the settings name; a page lies beside them."""
    format = str(settings.get("format", ""))
    return str(folder / format) if format.endswith((".yaml", ".yml")) else format


def _recognized(folder: Path, format: str) -> Format | None:
    page = named(format)
    return page if page.recognizes(folder) else None


def _below(folder: Path) -> list[Path]:
    """The nearest runs at most three levels deeper, where Lightning's is, among the first folders
    there."""
    level = [folder]
    for _ in range(3):
        inner = [p for above in level for p in _inside(above) if p.name != HOME and _is_folder(p)]
        level = sorted(inner)[:WIDTH]
        if found := [path for path in level if _is_run(path)]:
            return found
    return []


# Where only a hint is looked for, what can not be looked at, as a mount whose server is gone, has
# nothing in it.


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return disk.is_folder(path)
    return False


def _is_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_run(folder)
    return False
