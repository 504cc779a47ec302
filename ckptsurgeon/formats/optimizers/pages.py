"""Optimizers that a page describes: those that come with ckptsurgeon, and a user's own in YAML.

`check-optimizer` writes such a page, and proves it where the optimizer is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckptsurgeon import disk
from ckptsurgeon.errors import UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.formats.optimizers.entry import ABSENT_KEY, CONSTANT, STARTS, Entry, Start

SUFFIXES = (".yaml", ".yml")
KEYS = ("source", "optimizers")
ROLES = ("state", "settings", "counters", "beside", "unless", "refused")
STAY_OR_GO = (CONSTANT, ABSENT_KEY)


@cache
def shipped() -> tuple[Entry, ...]:
    """Of every page in the folder `described`. They are JSON, which is YAML as well: a reader of
    YAML would take as long as a whole surgery."""
    folder = Path(__file__).parent / "described"
    return tuple(
        entry
        for path in disk.matching(folder, "*.json")
        for entry in _entries(json.loads(path.read_bytes()), str(path))
    )


def read(path: Path) -> tuple[Entry, ...]:
    """The optimizers of one page. Raises UsageError with the key that is wrong."""
    try:
        data = plain_yaml.read(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", next="--optimizer FILE    the path of a page"
        ) from None
    return _entries(data, str(path))


def _entries(data: Mapping[str, Any], where: str) -> tuple[Entry, ...]:
    _known(data, KEYS, "", where)
    found = _mapping(data.get("optimizers"), "optimizers", where)
    if not found:
        raise UsageError(f"{where}: it describes no optimizer", next="docs/optimizers.md")
    source = str(data.get("source", ""))
    return tuple(_entry(str(name), source, each, where) for name, each in found.items())


def _entry(name: str, source: str, data: Any, where: str) -> Entry:
    inside = f"optimizers.{name}"
    values = _mapping(data, inside, where)
    _known(values, ROLES, f"{inside}.", where)
    settings = values.get("settings") or []
    if not isinstance(settings, list) or not all(isinstance(key, str) for key in settings):
        raise UsageError(f"{where}: `{inside}.settings` is {settings!r}", next="a list of keys")
    state = _starts(values.get("state"), f"{inside}.state", where)
    counters = _starts(values.get("counters"), f"{inside}.counters", where)
    beside = _starts(values.get("beside"), f"{inside}.beside", where)
    for key, start in beside.items():
        if start not in STAY_OR_GO:
            raise UsageError(
                f"{where}: `{inside}.beside.{key}` is {start!r}", next=" or ".join(STAY_OR_GO)
            )
    unless, refused = (str(values.get(key) or "") for key in ("unless", "refused"))
    return Entry(name, source, state, frozenset(settings), counters, unless, refused, beside)


def _starts(data: Any, inside: str, where: str) -> Mapping[str, Start]:
    out: dict[str, Start] = {}
    for key, start in _mapping(data or {}, inside, where).items():
        number = isinstance(start, (int, float))  # false is 0
        if not number and not (isinstance(start, str) and (start in STARTS or start[:1] == "<")):
            raise UsageError(
                f"{where}: `{inside}.{key}` is {start!r}",
                next=f"write a number, <KEY of the param group, or one of {', '.join(STARTS)}",
            )
        out[str(key)] = float(start) if number else start
    return MappingProxyType(out)


def _mapping(data: Any, inside: str, where: str) -> Mapping[Any, Any]:
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: `{inside}` must be a mapping", next="docs/optimizers.md")
    return data


def _known(data: Mapping[str, Any], known: Sequence[str], prefix: str, where: str) -> None:
    for key in data:
        if key not in known:
            raise unknown_key(f"{prefix}{key}", [f"{prefix}{each}" for each in known], where)
