"""No sentence says `1 files`: every number before a noun goes through `count` or `share`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.errors import count, share
from tests.support.launch import REPO

SOURCES = sorted((REPO / "ckptsurgeon").rglob("*.py"))
AFTER = re.compile(r" (?:[a-z-]+ ){0,2}?([a-z]+)\b")
NO_COUNT = re.compile(r"[A-Z_0-9]+(\.[A-Z_]+)?( //? \d+)?|short\(.*|.*\.join\(.*|.*path\.name")
"""A constant of ours is never 1; the rest are no numbers."""

VERBS = {"are", "were", "starts", "names"}
NO_NUMBERS = {
    ("moments", "self.moments"): "keep or reset",
    ("elements", "sizes"): "12 and 13 elements",
}


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Every text with values in it, and every call."""
    kinds = (ast.JoinedStr, ast.Call)
    walked = ((path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text())))
    return [(path, node) for path, node in walked if isinstance(node, kinds)]


def counted() -> set[str]:
    """The plural of each noun that is counted anywhere."""
    out = set()
    for _, node in nodes():
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("count", "share"):
            words = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            words = [word.split()[-1] for word in words if word[0].isalpha()]
            out |= {words[1] if len(words) == 2 else f"{words[0]}s"} if words else set()
    return out - VERBS


def bare() -> Iterator[tuple[str, str, str]]:
    """Each value in a text that a word follows: where, that word, and the value."""
    for path, node in nodes():
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                rounded = value.format_spec is not None and "." in ast.unparse(value.format_spec)
                if (found := AFTER.match(str(text.value))) and not rounded:
                    yield (
                        f"{path.relative_to(REPO)}:{node.lineno}",
                        found[1],
                        ast.unparse(value.value),
                    )


@pytest.mark.long
def test_a_number_before_a_noun_is_counted() -> None:
    nouns = counted()
    assert {"bytes", "events", "rows", "points", "steps", "entries"} <= nouns
    wrong = [
        f"{where}: {{{value}}} {noun}"
        for where, noun, value in bare()
        if noun in nouns and not NO_COUNT.fullmatch(value) and (noun, value) not in NO_NUMBERS
    ]
    assert wrong == []


@given(st.integers(0, 3), st.integers(0, 3))
def test_one_is_one(some: int, whole: int) -> None:
    assert count(whole, "file") == f"{whole} {'file' if whole == 1 else 'files'}"
    assert count(whole, "entry", "entries").endswith("entry") == (whole == 1)
    said = share(some, whole, "row", "stays", "stay")
    assert said.startswith(f"{some} of {count(whole, 'row')} ")
    assert said.endswith("stays") == (some == 1)
    assert share(some, whole, "row") == f"{some} of {count(whole, 'row')}"
