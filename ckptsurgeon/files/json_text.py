"""JSON that a trainer keeps beside its shards: read with limits, edited in place.

An edit replaces the text of the values that differ; all other bytes stay as the trainer wrote them.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsurgeon import whole_file
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.hints import command
from ckptsurgeon.plans.edits import Key

MAX_BYTES = 64 << 20
SPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()
SOUND = command("doctor", why="which step is sound")


def read(path: Path) -> Any:
    """The value in the file. Raises SurgeryError for one that is not JSON, or too long."""
    return parsed(path, text(path))


def text(path: Path) -> str:
    """All of the file. Raises SurgeryError where it is too long, or no UTF-8."""
    try:
        data = whole_file.read(path, MAX_BYTES)
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.EINVAL, errno.EAGAIN):
            raise
        raise SurgeryError(f"{path}: {error.strerror}", next=SOUND) from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SurgeryError(
            f"{path} is not JSON: {error}",
            next=SOUND,
        ) from None


def parsed(path: Path, text: str) -> Any:
    """The value of `text`, which is that of the file at `path`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SurgeryError(
            f"{path} is not JSON: {str(error)[:200]}",
            next=SOUND,
        ) from None


def mapping(path: Path) -> Mapping[str, Any]:
    """The object in the file; empty where it holds another value. Raises SurgeryError for a file
    that is not JSON."""
    value = read(path)
    return value if isinstance(value, dict) else {}


def edited(text: str, values: Mapping[tuple[Key, ...], Any]) -> str:
    """`text` with the value at each key path replaced. Raises KeyError for a path that leads
    nowhere, ValueError for a text that is not JSON."""
    spans = sorted((_span(text, path), new) for path, new in values.items())
    pieces, end = [], 0
    for (start, stop), new in spans:
        pieces += [text[end:start], json.dumps(new)]
        end = stop
    return "".join([*pieces, text[end:]])


def _span(text: str, path: tuple[Key, ...]) -> tuple[int, int]:
    """Where the value at `path` begins and ends. Of keys that come twice the last counts, as it
    does for every reader."""
    start = _past(text, 0)
    end = DECODER.raw_decode(text, start)[1]
    for key in path:
        start, end = _members(text, start)[key]
    return start, end


def _members(text: str, start: int) -> dict[Key, tuple[int, int]]:
    """The key or the number of each member of the object or the list at `start` → its span."""
    spans: dict[Key, tuple[int, int]] = {}
    if text[start] not in "{[":
        return spans
    at = _past(text, start + 1)
    while text[at] not in "}]":
        key: Key = len(spans)
        if text[start] == "{":
            key, at = DECODER.raw_decode(text, at)
            at = _past(text, _past(text, at) + 1)
        end = DECODER.raw_decode(text, at)[1]
        spans[key] = at, end
        at = _past(text, end)
        at = _past(text, at + 1) if text[at] == "," else at
    return spans


def _past(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    assert match is not None
    return match.end()
