"""Checkpoints written beside training: the same files, a pointer that moves when all are there."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look
from tests.support.in_process import InProcess
from tests.support.launch import launch, run_module
from tests.support.many_ranks import run_all
from train import trainer
from train.host_copy import Room, host_copy

pytestmark = pytest.mark.long

ASYNC = "async_save=true"
KINDS = [
    ["zero_stage=0"], ["zero_stage=1"], ["zero_stage=2"], ["zero_stage=3"],
    ["zero_stage=0", "dtype=bf16"], ["zero_stage=1", "dtype=bf16"], ["zero_stage=1", "dtype=fp16"],
]  # fmt: skip


def shards(run: Path) -> dict[str, bytes]:
    """The content of every file of every step. `save`, which is in the arguments, is left out."""
    found = {}
    for path in sorted(run.glob("global_step*/**/*")):
        if path.is_file():
            found[str(path.relative_to(run))] = path.read_bytes().replace(str(run).encode(), b"")
    return found


@pytest.mark.thinned(3)
@pytest.mark.parametrize("overrides", KINDS, ids=" ".join)
def test_the_files_are_those_of_a_save_that_training_waits_for(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    runs = [tmp_path / name for name in ("aside", "first")]  # of one length: it is in the files
    for run, more in zip(runs, ([], [ASYNC]), strict=True):
        in_process.train(run, *overrides, *more)
        assert (run / "latest").read_text() == "global_step6"
        assert not list(run.glob(".global_step*"))
    aside, first = map(shards, runs)
    assert aside.keys() == first.keys()
    for name in aside:
        # A word that stood there twice is one object, or two: memory is shared as it was.
        assert abs(len(aside[name]) - len(first[name])) < 1024
        if name.endswith(".pt"):
            assert same(*(torch.load(run / name, weights_only=False) for run in runs)), name


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(one[key], other[key]) for key in one if key not in ("save", "async_save")
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and same(vars(one), vars(other))
    return repr(one) == repr(other)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, tuple[int, Path]]:
    """Point → how the trainer ended that was killed there, and its run."""
    work = tmp_path_factory.mktemp("killed")
    launch("--config=train/configs/tiny.yaml", "--from-scratch", f"save={work / 'run'}",
           f"data={corpus}", "train_iters=2")  # fmt: skip
    done = run_module("tests.train.killed_saves", work / "run", corpus, work)
    found = json.loads(done.stdout.splitlines()[-1])
    return {point: (status, Path(run)) for point, (status, run) in found.items()}


def test_killed_anywhere_the_run_has_a_whole_latest(killed: dict[str, tuple[int, Path]]) -> None:
    calls = {point: end for point, end in killed.items() if point.startswith("call-")}
    (whole,) = (run for status, run in calls.values() if not status)
    kept = []
    for point, (status, run) in killed.items():
        named = (run / "latest").read_text()
        files = sorted(path.name for path in (whole / named).glob("*.pt"))
        assert sorted(path.name for path in (run / named).glob("*.pt")) == files
        for name in files:
            ours, theirs = (torch.load(r / named / name, weights_only=False) for r in (run, whole))
            assert same(ours, theirs), (point, name)
        if status:
            kept.append(named)
    assert {status for status, _ in killed.values()} == {0, -signal.SIGKILL, -signal.SIGXFSZ}
    assert len(calls) > 10
    assert set(kept) == {"global_step2", "global_step4"}


def test_after_a_kill_the_run_goes_on_as_if_nothing_were(
    killed: dict[str, tuple[int, Path]], in_process: InProcess
) -> None:
    (whole,) = (run for p, (status, run) in killed.items() if not status and "full" not in p)
    wanted = in_process.train(whole, ASYNC)
    assert list(wanted) == [5, 6]
    half_written = {
        p: run for p, (_, run) in killed.items() if list(run.glob(".global_step4.saving/*.pt"))
    }
    assert len(half_written) >= 4
    for run in list(half_written.values())[::3]:
        assert look.verify(Run.open(run), level=3).findings == ()
        found = in_process.train(run, ASYNC)
        assert {i: found[i] for i in wanted} == wanted
        assert not list(run.glob(".global_step*"))


@pytest.mark.parametrize("how", ["full", "full-at-once"])
def test_a_full_disk_ends_the_run_with_the_step_that_it_keeps(
    killed: dict[str, tuple[int, Path]], how: str
) -> None:
    _, run = killed[how]
    told = run.with_suffix(".error").read_text()
    assert "rank 0 can't write the checkpoint of iteration 4: " in told
    assert "latest names the last complete one" in told
    assert (run / "latest").read_text() == "global_step2"


def test_training_goes_on_while_a_checkpoint_is_written(
    in_process: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), torch.save

    def slow(*arguments: Any, **keywords: Any) -> None:
        assert go.wait(60)
        write(*arguments, **keywords)

    training = in_process.prepare(tmp_path, ASYNC, "save_interval=2", "train_iters=3")
    monkeypatch.setattr(torch, "save", slow)
    seen: list[bool] = []

    def say(line: str) -> None:
        if "iteration        3/" in line:
            seen.append((tmp_path / "latest").exists())
            go.set()

    trainer.train(training, say)
    assert seen == [False]
    assert (tmp_path / "latest").read_text() == "global_step3"
    assert (tmp_path / "global_step2").is_dir()


def test_two_ranks_name_a_step_when_both_have_written(corpus: Path, tmp_path: Path) -> None:
    cases = {"data": [], "pipeline": ["pipeline_model_parallel_size=2"]}
    jobs = {
        f"{name}{more}": [f"save={tmp_path / name}{more}", f"data={corpus}", "micro_batch_size=2",
                          *words, *([ASYNC] if more else [])]
        for name, words in cases.items() for more in ("", "-aside")
    }  # fmt: skip
    run_all(2, jobs, tmp_path / "jobs")
    for name in cases:
        first, aside = shards(tmp_path / name), shards(tmp_path / f"{name}-aside")
        assert first.keys() == aside.keys()
        assert (tmp_path / f"{name}-aside" / "latest").read_text() == "global_step6"


def test_what_other_ranks_had_left_is_no_part_of_a_step(
    in_process: InProcess, tmp_path: Path
) -> None:
    left = tmp_path / ".global_step2.saving"
    left.mkdir(parents=True)
    (left / "zero_pp_rank_7_mp_rank_00_optim_states.pt").touch()
    in_process.train(tmp_path, ASYNC)
    assert len(list((tmp_path / "global_step2").glob("*optim*"))) == 1
    assert not left.exists()


def test_a_step_of_a_branch_that_was_left_is_replaced(
    in_process: InProcess, tmp_path: Path
) -> None:
    old = tmp_path / "global_step2"
    training = in_process.prepare(tmp_path, ASYNC, "train_iters=2")
    old.mkdir(parents=True)
    (old / "old").touch()
    trainer.train(training, in_process.said.append)
    assert sorted(path.suffix for path in old.iterdir()) == [".pt", ".pt"]


def test_a_copy_does_not_change_with_what_it_is_of() -> None:
    flat = torch.arange(6.0)
    state = {"whole": flat, "part": flat[2:4], "list": [1], "weight": torch.nn.Parameter(flat[:2])}
    room = Room()
    copy = host_copy(state, room)
    place = copy["whole"].data_ptr()
    flat.zero_()
    state["list"].append(2)
    assert copy["part"].tolist() == [2, 3] and copy["list"] == [1]
    assert isinstance(copy["weight"], torch.nn.Parameter)
    copy["whole"][2] = 7.0
    assert copy["part"].tolist() == [7, 3]
    assert host_copy(state, room)["whole"].data_ptr() != place
    room.empty()
    again = host_copy(state, room)
    assert (again["whole"].data_ptr(), again["whole"].tolist()) == (place, [0] * 6)
