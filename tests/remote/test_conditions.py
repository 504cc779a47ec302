"""Which steps of a run in a bucket are complete, said without a look into each of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import layout
from tests.remote.conftest import Look
from tests.remote.proxy import proxy
from tests.remote.servers import take_times, upload

pytestmark = pytest.mark.remote
RANKS = 4


def requests(between: Any, look: Look, run: Path) -> int:
    """How many a look takes that says of the bucket's run what it says of this one."""
    here = look("status", "--json", "-C", run)
    between.clear()
    there = look("status", "--json", "-C", "s3://bucket/run")
    assert there.stdout == here.stdout.replace(str(run), "s3://bucket/run"), there.stderr
    return len(between.seen)


def test_equal_steps_are_not_opened(
    store: Any, server: str, look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty more steps with the names and sizes of a complete one cost no request more."""
    run = tmp_path / "run"
    layout.ranks(run, RANKS)
    upload(store, run, "run")
    take_times(store, run, "run")
    with proxy(server) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.address)
        few = requests(between, look, run)
        for step in range(1, 21):
            folder = run / f"global_step{step}"
            shutil.copytree(run / f"global_step{layout.STEP}", folder)
            upload(store, folder, f"run/{folder.name}")
        take_times(store, run, "run")
        shutil.rmtree(tmp_path / "cache")
        assert requests(between, look, run) == few
        assert len(json.loads(look("status", "--json", "-C", run).stdout)["steps"]) == 22


def lose_a_shard(folder: Path) -> None:
    """One of its files is not there."""
    next(folder.glob("*zero_pp_rank_3*")).unlink()


def lose_half_of_the_ranks(folder: Path) -> None:
    """It has the names of half as many ranks, each with half as much in its shard."""
    torch.save(layout.model_states(20, 2 * RANKS, 1), folder / "mp_rank_00_model_states.pt")
    for path in folder.glob("*optim_states.pt"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_the_model_file(folder: Path) -> None:
    """What says how many ranks there are can't be read."""
    path = folder / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "condition"),
    [(lose_a_shard, "incomplete"), (lose_half_of_the_ranks, "incomplete"),
     (cut_the_model_file, "damaged")],
)  # fmt: skip
def test_other_steps_are_opened(
    spoil: Callable[[Path], None], condition: str, store: Any, look: Look, tmp_path: Path
) -> None:
    """A step that lacks a name of a complete one, or has another size, is judged by its bytes."""
    run = tmp_path / "run"
    layout.ranks(run, RANKS)
    for step in (10, 20):
        shutil.copytree(run / f"global_step{layout.STEP}", run / f"global_step{step}")
    spoil(run / "global_step20")
    upload(store, run, "run")
    take_times(store, run, "run")
    there = look("status", "-C", "s3://bucket/run").stdout
    assert f"{condition}: 20" in there
    assert there == look("status", "-C", run).stdout.replace(str(run), "s3://bucket/run")
