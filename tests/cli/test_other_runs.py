"""One --format is that of every run that a command names: no second option could say it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Surgeon
from tests.support.own_loops import FORMAT, by_initial_lr, train
from tests.support.snapshot import snapshot
from tests.support.tiny_run import make_run


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


@pytest.mark.parametrize(
    "words", [("graft", "moments", "--from", 2, "--of"), ("transplant", "--from")]
)
def test_no_other_run_is_not_taken_for_the_one_of_C(
    surgeon: Surgeon, tmp_path: Path, words: tuple[object, ...]
) -> None:
    """A folder that is not there, and one without a run; a near name is offered."""
    root = make_run(tmp_path / "run", (2, 4))
    make_run(tmp_path / "other", (2, 4))
    for folder in (tmp_path / "zzz", Path("/etc")):
        told = surgeon(*words, folder, "-n", "-C", root)
        assert told.exit_code == 2
        assert told.stderr.splitlines()[2] == (
            "next: name the folder of the other run, which holds its checkpoints"
        )
    near = surgeon(*words, tmp_path / "othre", "-n", "-C", root).stderr
    assert f" {tmp_path / 'other'} -n -C {root}" in near
