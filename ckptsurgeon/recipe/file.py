"""A recipe as plain data: read from YAML with overrides, its keys and types checked, and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsurgeon import operations
from ckptsurgeon.errors import UsageError
from ckptsurgeon.files import plain_yaml
from ckptsurgeon.files.plain_yaml import unknown_key
from ckptsurgeon.hints import again
from ckptsurgeon.operations.fields import converted, names
from ckptsurgeon.operations.section import Recipe, Section

HEADER: dict[str, type] = {"version": int, "name": str, "why": str}
"""The keys of a recipe that belong to no section."""


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from YAML, then lay `section.key=value` overrides over it.

    Raises UsageError: with the line for broken YAML, with the nearest key for an unknown one."""
    try:
        data = plain_yaml.read(Path(path))
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}",
            next=again(swapped=(path, "RECIPE.yaml"), why="with another path"),
        ) from None
    return _from_file(data, overrides, str(path))


def read(raw: bytes, overrides: Sequence[str] = (), *, where: str) -> Recipe:
    """The same of the bytes of a recipe; `where` names them in an error."""
    return _from_file(plain_yaml.decoded(raw, where), overrides, where)


def _from_file(data: Mapping[str, Any], overrides: Sequence[str], where: str) -> Recipe:
    for key, value in data.items():
        _refuse_empty(key, value, where)
    return from_data(data, overrides, where=where)


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
            header[key] = converted(HEADER[key], value, key, where)
        elif kind is None:
            inside = [f"{k.key}.{key}" for k in kinds.values() if k.key and key in names(k)]
            if inside:  # `lr: 3e-5` without its `set:`
                raise UsageError(
                    f"{where}: unknown key `{key}`", next=f"did you mean `{inside[0]}`?"
                )
            raise unknown_key(key, [*HEADER, *kinds], where)
        elif not kind.key:
            sections.setdefault(kind, {})[key] = value
        elif value is not None or operations.stands(kind):
            # `rollback:` without a value asks for nothing
            sections[kind] = value
    version = header.pop("version", 1)
    if version != 1:
        raise UsageError(f"recipe version {version} is not known", next="version: 1")
    made = [kind.build(value, where) for kind, value in sections.items()]
    return Recipe(*made, **header)


def _refuse_empty(key: str, value: Any, where: str) -> None:
    """Raise UsageError for a key inside of a section that has no value: whoever wrote it asks for
    something, and would get the rest without it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if inner is None:
                raise UsageError(
                    f"{where}: `{key}.{name}` has no value", next="give it one, or leave it out"
                )
            _refuse_empty(f"{key}.{name}", inner, where)


def to_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data without what it leaves at its default."""
    header = {"name": recipe.name, "why": recipe.why}
    data: dict[str, Any] = {key: text for key, text in header.items() if text}
    for section in operations.in_order(recipe):
        values = _sparse(section)
        if not section.key:
            data |= values
        elif values or not operations.stands(type(section)):
            data[section.key] = values
    return data


def keys(kind: type[Section]) -> list[str]:
    """The keys of a recipe that a section takes."""
    return [kind.key] if kind.key else names(kind)


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
