"""What is done in a bucket is what is done on a disk; an undo takes it back, and a redo brings it
again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.remote.buckets import RUN, fill, held, long_run, objects
from tests.remote.conftest import Look

pytestmark = [
    pytest.mark.remote,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]
WORDS = (
    ["rollback", "--to", "4"],
    ["rollback", "--to", "4", "--no-keep-tb"],
    ["truncate-tb-events", "--after", "6"],
    ["truncate-logs", "--after", "6", "--keep-tb", "cut"],
    ["set-lr", "3e-5"],
    ["set", "lr=3e-5", "weight_decay=0.2"],
    ["reset", "moments"],
)
OF_TRAINERS = (
    ("Hugging Face", "cooldown 2"),
    ("nanotron", "repair-latest"),
    ("nanotron", "skip 7-8 --by-counters"),
    ("bundled trainer", "skip 100-110"),
)
"""What depends on how a trainer says which step it loads, on its schedule and on its data."""


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_surgery_is_that_of_a_disk(
    words: list[str], store: Any, look: Look, tmp_path: Path
) -> None:
    run = long_run(tmp_path / "run")
    fill(store, run)
    held(words, store, look, run)


@pytest.mark.parametrize(("name", "words"), OF_TRAINERS, ids=map(" ".join, OF_TRAINERS))
def test_what_depends_on_the_trainer_is_that_of_a_disk(
    name: str, words: str, run_of: Callable[[str], Path], store: Any, look: Look, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_of(name), run)
    if words == "repair-latest":
        assert (run / "latest.txt").is_file()
        (run / "latest.txt").write_text("99")
    fill(store, run)
    held(words.split(), store, look, run)


def test_a_redo_refuses_what_was_saved_again(store: Any, look: Look, tmp_path: Path) -> None:
    """Since the undo, with as many bytes, a second later: a store may count seconds."""
    run = long_run(tmp_path / "run")
    fill(store, run)
    for words in (["set-lr", "3e-5"], ["undo"]):
        assert look(*words, "--yes", "-C", RUN).exit_code == 0
    name = "checkpoint-8/optimizer.pt"
    time.sleep(1.1)
    fill(store, run)
    before = objects(store)
    found = look("redo", "--yes", "-C", RUN)
    assert found.exit_code == 1 and f"{name}: saved again" in found.stderr.replace("\n", " ")
    assert objects(store) == before
