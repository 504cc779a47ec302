"""The table in docs/recipes.md is what each Key says; `GOLDEN=write` writes it anew."""

from __future__ import annotations

import dataclasses
import os
import typing
from typing import Any

from ckptsurgeon.operations import kinds
from ckptsurgeon.operations.fields import Fields, converted, full_key, hints, keys
from ckptsurgeon.operations.key import Key
from ckptsurgeon.recipe.file import HEADER
from tests.support.launch import REPO

PAGE = REPO / "docs" / "recipes.md"
NOUNS = {int: "whole number", float: "number", str: "text"}


def value(kind: Any, name: str, key: Key) -> str:
    """What the key takes, as the page shows it."""
    if key.value:
        return key.value
    hint = hints(kind)[name]
    if hint is bool:
        return f"`{str(not getattr(kind, name)).lower()}`"
    if key.one_of:
        words = ", ".join(f"`{word}`" for word in key.one_of)
        return f"list of {words}" if typing.get_origin(hint) is list else words
    if key.pattern:
        return "pattern"
    types = typing.get_args(hint) or (hint,)
    noun = NOUNS[types[0]]
    return key.limits.words(noun) + (", `0.5x`" if {float, str} <= {*types} else "")


def rows(kind: type[Fields]) -> list[str]:
    """Of the keys of a section and of what stands in it."""
    out = []
    for name, key in keys(kind).items():
        inner = [
            each
            for each in (hints(kind)[name], *typing.get_args(hints(kind)[name]))
            if isinstance(each, type) and issubclass(each, Fields)
        ]
        if inner:
            out += rows(inner[0])
            continue
        shown = full_key(kind, "KEY" if name == kind.rest[0] else name)
        out.append(f"| `{shown}` | {value(kind, name, key)} | {key.means} |".replace("|  |", "| |"))
    return out


def test_the_table_is_what_each_key_says() -> None:
    written = PAGE.read_text("utf-8")
    head, _, rest = written.partition("|---|---|---|\n")
    table, _, after = rest.partition("\n\n")
    header, made = (
        table.splitlines()[: len(HEADER)],
        [row for kind in kinds() for row in rows(kind)],
    )
    text = "\n".join([f"{head}|---|---|---|", *header, *made, "", after])
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(text, "utf-8")
    assert PAGE.read_text("utf-8") == text
    assert [row.split("`")[1] for row in header] == [*HEADER]


def test_every_key_says_what_it_means_or_what_it_takes() -> None:
    silent = [row for kind in kinds() for row in rows(kind) if row.endswith("| text | |")]
    assert silent == []


def test_a_default_is_what_is_made_of_it() -> None:
    """A section of defaults alone is not looked at when it is made."""
    checked = 0
    for kind in (each for section in kinds() for each in _with_inner(section)):
        for item in dataclasses.fields(kind):
            made = item.default_factory
            default = item.default if made is dataclasses.MISSING else made()
            if default is not dataclasses.MISSING and item.name != kind.rest[0]:
                new = converted(hints(kind)[item.name], default, item.name)
                assert new == default and type(new) is type(default), (kind, item.name)
                checked += 1
    assert checked > 40


def _with_inner(kind: type[Fields]) -> list[Any]:
    inner = [t for hint in hints(kind).values() for t in (hint, *typing.get_args(hint))]
    return [kind, *(t for t in inner if isinstance(t, type) and issubclass(t, Fields))]
