"""A file that nobody may replace or rename is refused before the commit, by name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hostile.hostile_run import call
from tests.support.snapshot import exact_snapshot
from tests.support.tiny_run import make_run


@contextmanager
def held(path: Path, flag: str) -> Iterator[None]:
    done = subprocess.run(["chattr", f"+{flag}", path], capture_output=True)
    if done.returncode:
        pytest.skip("chattr needs root and a file system that has such flags")
    try:
        yield
    finally:
        subprocess.run(["chattr", f"-{flag}", path], check=True)


@pytest.mark.parametrize(("flag", "word"), [("i", "immutable"), ("a", "append-only")])
@pytest.mark.parametrize("name", ["checkpoint-4/optimizer.pt", "checkpoint-8", "."])
def test_it_is_refused_and_nothing_is_touched(
    tmp_path: Path, name: str, flag: str, word: str
) -> None:
    root = make_run(tmp_path / "run", steps=(4, 8))
    words = ("rollback", "--to", "4", "--set", "eps=1e-6", "--yes", "-C", root)
    (tmp_path / "other").hardlink_to(root / "checkpoint-4" / "optimizer.pt")  # so it is replaced
    before = exact_snapshot(root)
    with held(root / name, flag):
        code, _, said = call(*words)
        assert code == 1, said
        assert word in said or "may not write" in said, said
        assert exact_snapshot(root) == before
    assert call(*words)[0] == 0
