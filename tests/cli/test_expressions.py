"""An expression of a recipe is searched for as `re` does, and never for long."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.errors import UsageError
from ckptsurgeon.files import expressions
from ckptsurgeon.files.expressions import bounded, search
from tests.cli.conftest import Surgeon
from tests.conftest import Trained

ENDLESS = r"((.|.)*)*!$"
"""Twice the work with each letter."""
WORDS = ("layers", "0", ".", "weight", "attn", "bias")


@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map("".join), max_size=20),
    st.sampled_from(["", r"\.0\.", "weight$", "^attn", "a.*b", "(?i)BIAS"]),
)
def test_the_names_are_those_of_re(names: list[str], pattern: str) -> None:
    assert search(pattern, names) == {name for name in names if re.search(pattern, name)}


def test_an_expression_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 0.1)
    for _ in range(2):  # what was before is there again
        with pytest.raises(UsageError, match="takes more than"):
            search(ENDLESS, ["a" * 80])
        assert search("a", ["a", "b"]) == {"a"}


def test_another_thread_searches_without_a_bound() -> None:
    found: list[frozenset[str]] = []
    thread = threading.Thread(target=lambda: found.append(search("a", ["a", "b"])))
    thread.start()
    thread.join()
    assert found == [{"a"}]


@pytest.mark.parametrize(
    "words",
    [
        ["reset", "moments", "--params", ENDLESS],
        ["scale", ENDLESS, "--by", "0.5"],
        ["graft", "moments", "--from", "4", "--params", ENDLESS],
        ["rename-tb-events", "--regex", ENDLESS, "b"],
    ],
    ids=lambda words: words[0],
)
def test_no_command_works_on_it_for_long(
    surgeon: Surgeon, trained: Trained, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 0.1)
    root: Path = trained()
    done = surgeon(*words, "-y", "-C", root)
    assert done.exit_code == 2
    assert "takes more than" in done.stderr and "untouched: the run is exactly" in done.stderr


def test_what_is_bounded_is_carried_out() -> None:
    with bounded("a"):
        assert re.search("a", "a")
