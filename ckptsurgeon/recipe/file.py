"""A recipe as plain data: read from YAML with overrides, its keys and types checked, and back."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import operations
from ckptsurgeon.errors import UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.operations.section import Recipe, Section

HEADER: dict[str, type] = {"version": int, "name": str, "why": str}
"""The keys of a recipe that belong to no section."""


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from YAML, then lay `section.key=value` overrides over it.

    Raises UsageError: with the line for broken YAML, with the nearest key for an unknown one."""
    try:
        data = plain_yaml.read(path)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", next="ckptsurgeon plan RECIPE.yaml    with another path"
        ) from None
    return from_data(data, overrides, where=str(path))


def from_data(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "the command line"
) -> Recipe:
    """A Recipe from plain data plus `section.key=value` overrides; types and keys are checked."""
    kinds = {key: kind for kind in operations.kinds() for key in keys(kind)}
    header: dict[str, Any] = {}
    sections: dict[type[Section], dict[str, Any]] = {}
    for key, value in plain_yaml.lay(data, overrides).items():
        kind = kinds.get(key)
        if key in HEADER:
            header[key] = _convert(HEADER[key], value, key, where)
        elif kind is None:
            inside = [f"{k.key}.{key}" for k in kinds.values() if k.key and key in _names(k)]
            if inside:  # `lr: 3e-5` without its `set:`
                raise UsageError(
                    f"{where}: unknown key `{key}`", next=f"did you mean `{inside[0]}`?"
                )
            raise unknown_key(key, [*HEADER, *kinds], where)
        elif not kind.key:
            sections.setdefault(kind, {})[key] = value
        elif value is not None or kind.standing:  # `rollback:` without a value asks for nothing
            sections[kind] = value
    version = header.pop("version", 1)
    if version != 1:
        raise UsageError(f"recipe version {version} is not known", next="version: 1")
    made = [
        _build(kind, value, f"{kind.key}." if kind.key else "", where)
        for kind, value in sections.items()
    ]
    return Recipe(*made, **header)


def to_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data without what it leaves at its default."""
    header = {"name": recipe.name, "why": recipe.why}
    data: dict[str, Any] = {key: text for key, text in header.items() if text}
    for section in operations.in_order(recipe):
        values = _sparse(section)
        if not section.key:
            data |= values
        elif values or not section.standing:
            data[section.key] = values
    return data


def keys(kind: type[Section]) -> list[str]:
    """The keys of a recipe that a section takes."""
    return [kind.key] if kind.key else _names(kind)


def _names(kind: Any) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


def _sparse(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        here = getattr(value, item.name)
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if here == default and default is not dataclasses.MISSING:
            continue
        if item.name == getattr(value, "rest", ("",))[0]:
            out |= here
            continue
        out[item.name] = _sparse(here) if dataclasses.is_dataclass(here) else here
    return out


# --- types ---------------------------------------------------------------------------------------


def _build(kind: Any, data: Any, prefix: str, where: str) -> Any:
    names = _names(kind)
    if not isinstance(data, Mapping):
        raise UsageError(
            f"{where}: `{prefix.rstrip('.')}` must be a mapping, not {data!r}",
            next=f"its keys are: {', '.join(names)}",
        )
    hints = typing.get_type_hints(kind)
    field, further = getattr(kind, "rest", ("", frozenset()))
    names = [name for name in names if name != field]
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in further and key not in names:
            values.setdefault(field, {})[key] = _number(value, f"{prefix}{key}", where)
            continue
        if key not in names:
            known, rare = ([f"{prefix}{n}" for n in some] for some in (names, sorted(further)))
            raise unknown_key(f"{prefix}{key}", known, where, getattr(kind, "synonyms", {}), rare)
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
    write = "a number such as 3e-5, or a scale such as 0.5x" if relative else "a number"
    raise _wrong(key, value, write, where)


def _wrong(key: str, value: Any, write: str, where: str) -> UsageError:
    return UsageError(f"{where}: `{key}` is {value!r}", next=f"write {write}")
