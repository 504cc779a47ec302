"""Records that lead elsewhere, each source with each lie: no command follows them."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("source", lies.SOURCES)
def test_no_command_follows_a_lie(place: Path, source: str) -> None:
    """As the user whose files the lie leads to."""
    for lead in lies.LEADS:
        root = hostile(place, source, lead)
        for words in lies.SOURCES[source].commands:
            run_watched(root, words)


@ROOT
@pytest.mark.parametrize("source", lies.SOURCES)
def test_root_follows_no_lie_in_the_run_of_another_user(place: Path, source: str) -> None:
    for lead in lies.LEADS:
        root = hostile(place, source, lead, lies.OWNER)
        for words in lies.SOURCES[source].commands:
            run_watched(root, words)


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
