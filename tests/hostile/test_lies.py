"""Records that lead elsewhere, each source with each lie: no command follows them."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsurgeon.surgery import render, restore, undo
from ckptsurgeon.transaction import journal, lock
from tests.hostile import lies
from tests.hostile.watched import as_user, load_everything, run_watched

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user can reach, with a world to copy."""
    load_everything()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        lies.world(Path(name) / "template")
        yield Path(name)


def hostile(place: Path, source: str, lead: str, owner: int = 0) -> Path:
    world = lies.copied(place / "template", place / f"world{next(NUMBERS)}")
    lies.told(world / "run", source, lead)
    return lies.owned(world, owner) / "run" if owner else world / "run"


@pytest.mark.thinned(5)
@pytest.mark.parametrize("source", lies.SOURCES)
@pytest.mark.long
def test_no_command_follows_a_lie(place: Path, source: str) -> None:
    """As the user whose files the lie leads to."""
    for lead in lies.LEADS:
        root = hostile(place, source, lead)
        for words in lies.SOURCES[source].commands:
            run_watched(root, words)


@pytest.mark.thinned(5)
@ROOT
@pytest.mark.parametrize("source", lies.SOURCES)
@pytest.mark.long
def test_root_follows_no_lie_in_the_run_of_another_user(place: Path, source: str) -> None:
    for lead in lies.LEADS:
        root = hostile(place, source, lead, lies.OWNER)
        for words in lies.SOURCES[source].commands:
            run_watched(root, words)


@pytest.mark.thinned(5)
@ROOT
@pytest.mark.parametrize("source", lies.SOURCES)
def test_a_user_without_rights_meets_no_traceback(place: Path, source: str) -> None:
    lead = "climbs"
    root = hostile(place, source, lead, lies.OWNER)
    commands = lies.SOURCES[source].commands
    as_user(lies.OWNER, lambda: [run_watched(root, words) for words in commands])


def test_an_honest_run_takes_the_same_commands(place: Path) -> None:
    """The watch and the world stop nobody who tells the truth."""
    world = lies.copied(place / "template", place / "honest")
    for words in (*lies.LOOK, *lies.SET, ("undo", "-y"), ("undo", "-y"), *lies.PRUNE):
        assert run_watched(world / "run", words)[0] == 0, words


REACHING = sorted({
    *(name for name in lies.SOURCES if re.match("(undo's )?receipt: |journal: |plan: ", name)),
    "lock: token",
} - {"receipt: id", "journal: id"})  # fmt: skip
"""Those that nothing but the check of names, and of tokens, stands in the way of."""


@pytest.mark.thinned(5)
@pytest.mark.parametrize("source", REACHING)
def test_the_watch_sees_a_lie_that_is_believed(
    place: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check of names, the same lies lead to the victim."""
    for module in (journal, undo, render, restore):
        for check in ("refuse_foreign", "refuse_foreign_staging"):
            monkeypatch.setattr(module, check, lambda *_: None, raising=False)
    monkeypatch.setattr(lock, "TOKEN", re.compile(".*"))
    root = hostile(place, source, "climbs")
    with pytest.raises(AssertionError, match=r"touched the victim|copied what the victim has"):
        for words in lies.SOURCES[source].commands:
            run_watched(root, words)
