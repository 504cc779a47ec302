"""One --format is that of every run that a command names: no second option could say it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Surgeon
from tests.support.own_loops import FORMAT, by_initial_lr, train
from tests.support.snapshot import snapshot


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of a loop that no format recognizes by itself."""
    for name in ("one", "other"):
        train(tmp_path / name, by_initial_lr, 8)
    return tmp_path / "one", tmp_path / "other"


def test_a_fork_brings_the_logs_of_its_run(surgeon: Surgeon, pair: tuple[Path, Path]) -> None:
    root, branch = pair[0], pair[0].with_name("branch")
    (root / "log.jsonl").rename(root / "metrics.jsonl")
    before = snapshot(root)
    words = ("--format", FORMAT, "-C", root)
    done = surgeon("fork", branch, "--step", 4, "--copy", "--logs", *words)
    assert done.exit_code == 0, done.stderr
    lines = (branch / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert snapshot(root) == before


def test_a_graft_takes_the_moments_of_another_run(
    surgeon: Surgeon, pair: tuple[Path, Path]
) -> None:
    root, other = pair
    before = snapshot(root), snapshot(other)
    words = ("--yes", "--format", FORMAT, "-C", root)
    done = surgeon("graft", "moments", "--from", 4, "--of", other, *words)
    assert done.exit_code == 0, done.stderr
    assert snapshot(root) != before[0]
    done = surgeon("undo", *words)
    assert done.exit_code == 0, done.stderr
    assert (snapshot(root), snapshot(other)) == before
