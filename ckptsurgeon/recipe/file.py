"""Reads a recipe: YAML, overrides, types; the only module that imports OmegaConf.

A recipe is data from anywhere: resolvers are off; aliases, tags, duplicate keys, deep nesting and
files over 1 MB are refused before a value is read.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon.errors import UsageError
from ckptsurgeon.recipe.recipe import Recipe, unknown_key

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MISREAD = re.compile(r"<<|[-+]?\d[\d_]*(:\d+)+(\.\d*)?|[-+]?0\d+")
"""Plain scalars that mean a merge, a number of base 60 (12:30 is 750) or of base 8 (010 is 8)."""


FIXES = {
    "duplicate key": "write each key once",
    "'\\t'": "indent with spaces, not with tabs",
    "another document": "keep one document in a file, without ---",
    "expected ',' or": "close each { and [",
}
"""What helps against an error of the YAML reader, by a word of it."""


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from YAML, then lay `section.key=value` overrides over it.

    Raises UsageError: with the line for broken YAML, with the nearest key for an unknown one."""
    try:
        text = _text(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}",
            next="ckptsurgeon plan RECIPE.yaml    with a file that is there",
        ) from None
    return from_data(_parse(text, str(path)), overrides, where=str(path))


def _text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"{path}: more than {MAX_BYTES} bytes; a recipe has at most {MAX_BYTES}",
            next="check that this is the recipe and not another file",
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start}: not UTF-8 text", next="save it as UTF-8"
        ) from None


def from_data(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "the command line"
) -> Recipe:
    """A Recipe from plain data plus `section.key=value` overrides; types and keys are checked."""
    merged: dict[str, Any] = dict(data)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UsageError(f"{override!r} is not KEY=VALUE", next="for example: set.lr=3e-5")
        _lay(merged, key.split("."), _parse_scalar(value), override)
    recipe = _build(Recipe, merged, "", where)
    assert isinstance(recipe, Recipe)
    return recipe


def settings(path: Path) -> dict[str, Any]:
    """The plain data of a run's `ckptsurgeon.yaml`, read with the same refusals as a recipe."""
    return _parse(_text(path), str(path))


# --- YAML ----------------------------------------------------------------------------------------


def _parse(text: str, where: str) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf

    fix = "quote texts that hold `: ` or `#`, for example: why: 'spike: roll back'"
    try:
        _refuse_tricks(yaml.parse(text, Loader=yaml.SafeLoader), where)
        loaded = OmegaConf.create(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        fix = next((text for word, text in FIXES.items() if word in problem), fix)
        raise UsageError(f"{where}{line}: {problem}", next=fix) from None
    except RecursionError:
        raise UsageError(f"{where}: nested too deep", next="a recipe has two levels") from None
    except ValueError as error:
        raise UsageError(f"{where}: {str(error).splitlines()[0]}", next=fix) from None
    data = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(data, dict):
        raise UsageError(
            f"{where}: a recipe is a mapping of sections", next="see recipes/ for examples"
        )
    return {str(key): value for key, value in data.items()}


def _refuse_tricks(events: Iterator[Any], where: str) -> None:
    depth, before = 0, ""
    for event in events:
        line = event.start_mark.line + 1
        name = type(event).__name__
        if before == "DocumentStartEvent" and name != "MappingStartEvent":
            raise UsageError(
                f"{where}: a recipe is a mapping of sections", next="see recipes/ for examples"
            )
        before = name
        if name == "AliasEvent" or getattr(event, "anchor", None):
            raise UsageError(
                f"{where}:{line}: anchors and aliases are refused", next="write it out"
            )
        if getattr(event, "tag", None):
            raise UsageError(
                f"{where}:{line}: tag {event.tag} is refused", next="write a plain value"
            )
        if name == "ScalarEvent" and "${" in event.value:
            raise UsageError(
                f"{where}:{line}: ${{…}} is never expanded in a recipe",
                next="write the value itself",
            )
        if name == "ScalarEvent" and event.implicit[0] and MISREAD.fullmatch(event.value):
            raise UsageError(
                f"{where}:{line}: YAML reads {event.value} as something else",
                next="quote it if it is a text; write a number without `:` and leading zeros",
            )
        depth += name in ("MappingStartEvent", "SequenceStartEvent")
        depth -= name in ("MappingEndEvent", "SequenceEndEvent")
        if depth > MAX_DEPTH:
            raise UsageError(
                f"{where}:{line}: nested deeper than {MAX_DEPTH}", next="a recipe has two levels"
            )


def _parse_scalar(text: str) -> Any:
    try:
        return _parse(f"value: {text}" if text else "value: ''", "the command line")["value"]
    except UsageError:
        return text


def _lay(data: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        inner = data.get(key)
        data[key] = dict(inner) if isinstance(inner, Mapping) else {}
        data = data[key]
    if not keys[-1]:
        raise UsageError(f"{override!r} is not KEY=VALUE", next="for example: set.lr=3e-5")
    data[keys[-1]] = value


# --- types ---------------------------------------------------------------------------------------


def _build(kind: type, data: Any, prefix: str, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise UsageError(
            f"{where}: `{prefix.rstrip('.')}` must be a mapping, not {data!r}",
            next=f"its keys are: {', '.join(f.name for f in dataclasses.fields(kind))}",
        )
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in hints:
            raise unknown_key(f"{prefix}{key}", [f"{prefix}{name}" for name in hints], where)
        values[key] = _convert(hints[key], value, f"{prefix}{key}", where)
    missing = [
        f"{prefix}{item.name}"
        for item in dataclasses.fields(kind)
        if item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
        and item.name not in values
    ]
    if missing:
        raise UsageError(f"{where}: `{missing[0]}` is missing", next=f"add {missing[0]}")
    return kind(**values)


def _convert(hint: Any, value: Any, key: str, where: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None:
            return None
        if len(options) == 1:
            return _convert(options[0], value, key, where)
        return _number(value, key, where)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, f"{key}.", where)
    if hint is float:
        return _number(value, key, where, relative=False)
    if typing.get_origin(hint) is list:
        items = value if isinstance(value, list) else [value]
        if any(not isinstance(item, (str, int)) or isinstance(item, bool) for item in items):
            raise _wrong(key, value, "a list of texts", where)
        return [str(item) for item in items]
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise _wrong(key, value, "a mapping of text to text", where)
        return {str(k): v for k, v in value.items()}
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e6 samples is how people write it
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        words = {int: "a whole number", str: "a text", bool: "true or false"}
        raise _wrong(key, value, words[hint], where)
    return value


def _number(value: Any, key: str, where: str, relative: bool = True) -> float | str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise _wrong(key, value, "a finite number", where)
        return float(value)
    if isinstance(value, str):
        body = value[:-1] if value.endswith("x") and relative else value
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", body):
            return value if body != value else float(value)
    wanted = "a number such as 3e-5, or a scale such as 0.5x" if relative else "a number"
    raise _wrong(key, value, wanted, where)


def _wrong(key: str, value: Any, wanted: str, where: str) -> UsageError:
    return UsageError(f"{where}: `{key}` is {value!r}", next=f"write {wanted}")
