"""The names that a page describes: read as a regular expression reads them, without its cost."""

from __future__ import annotations

import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.formats.described.name_pattern import NamePattern
from tests.support.counted import calls

WORDS = st.lists(
    st.sampled_from(["*", "{step}", "{rank}", "a", "-", "1", "ab"]), min_size=1, max_size=5
)


def by_expression(words: list[str], name: str) -> dict[str, int] | None:
    """What Python's own reader says, which goes back as often as it takes."""
    seen: set[str] = set()
    out = ""
    for word in words:
        if word == "*":
            out += "(?s:.*)"
        elif word.startswith("{") and word in seen:
            out += f"(?P={word[1:-1]})"
        elif word.startswith("{"):
            seen.add(word)
            out += rf"(?P<{word[1:-1]}>\d{{1,18}})"
        else:
            out += re.escape(word)
    match = re.fullmatch(out, name)
    return {key: int(text) for key, text in match.groupdict().items()} if match else None


@given(WORDS, st.text(alphabet="ab-012", max_size=12))
def test_it_reads_as_a_regular_expression_does(words: list[str], name: str) -> None:
    """But for a number that comes twice, of which it takes the first reading alone."""
    if len({word for word in words if "{" in word}) == sum("{" in word for word in words):
        assert NamePattern("".join(words)).numbers(name) == by_expression(words, name)


@pytest.mark.parametrize(
    "pattern", ["*a" * 12 + "b{step}", "{a}{b}{c}{d}{e}*{f}*{g}x", "*" * 200 + "x"]
)
def test_work_grows_with_the_name_alone(pattern: str) -> None:
    for letter in "a1":
        assert calls(partial(NamePattern(pattern).numbers, 255 * letter)) < 300_000


def test_a_number_that_comes_twice_is_one() -> None:
    assert NamePattern("step{step}-{step}.pt").numbers("step12-12.pt") == {"step": 12}
    assert NamePattern("step{step}-{step}.pt").numbers("step12-13.pt") is None
