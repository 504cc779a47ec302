"""Another batch size from the next step on: samples stay, what is counted in steps is converted."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.schedules import rampup
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support import deepspeed_engine
from tests.support.launch import first_line, launch
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back


def args_of(root: Path, step: int) -> Any:
    file = root / f"global_step{step}" / "mp_rank_00_model_states.pt"
    return torch.load(file, weights_only=False)["args"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.witness("bundled trainer", "set batch_size", by="deepspeed")
@pytest.mark.long
def test_the_trainer_trains_the_next_batch_with_the_new_size(trained: Trained, ranks: int) -> None:
    root = trained(ranks=ranks)
    config = root / "train.yaml"
    config.write_text(config.read_text().replace("train_iters: 8\n", "train_iters: 12\n"))
    before = snapshot(root)
    made = operate(root, {"set": {"batch_size": 16}})
    told = "; ".join(made.warnings)
    assert "train_iters 12 → 10" in told
    assert "8 + 2 = 10 (4 × 8 / 16)" in told
    assert "the schedule counts samples, so it stays" in told
    assert made.promise is not None and made.before is not None
    assert made.promise.lr == made.before.lr
    line = first_line(root, ranks)
    assert compare(made.promise, line) == []
    assert json.loads(line)["consumed_samples"] == 64
    take_back(root, before)

    operate(root, {"set": {"batch_size": 16}})
    done = launch(f"--config={config}", ranks=ranks)
    assert re.findall(r"consumed samples: +(\d+)", done.stdout) == ["80", "96"]
    last = args_of(root, 10)
    assert (last.consumed_train_samples, last.global_batch_size) == (96, 16)
    assert look.inspect(Run.open(root)).promise.consumed_samples == 96


@pytest.mark.witness("bundled trainer", "set rampup", by="deepspeed")
def test_the_trainer_ramps_up_from_the_next_batch(trained: Trained) -> None:
    root = trained()
    config = root / "train.yaml"
    config.write_text(config.read_text().replace("train_iters: 8\n", "train_iters: 12\n"))
    before = snapshot(root)
    made = operate(root, {"set": {"rampup": [4, 4, 100]}})
    assert "rampup_batch_size: [4, 4, 100]\n" in config.read_text()
    assert made.promise is not None and made.title == "set rampup=[4, 4, 100]"
    assert compare(made.promise, first_line(root)) == []
    take_back(root, before)

    # 64 consumed samples are past half of the ramp, so this batch has 8; from 4 with a longer one.
    operate(root, {"set": {"rampup": [4, 4, 1000], "batch_size": 8}})
    launch(f"--config={config}")
    steps = sorted(int(p.name[11:]) for p in root.glob("global_step*"))
    assert args_of(root, steps[-1]).consumed_train_samples == 96
    assert steps[-1] == 16  # the 32 samples of four batches of 8 take eight of 4


def test_a_rampup_is_taken_away(trained: Trained) -> None:
    root = trained()
    operate(root, {"set": {"rampup": [4, 4, 1000]}})
    operate(root, {"set": {"rampup": []}})
    assert "rampup_batch_size: null\n" in (root / "train.yaml").read_text()
    assert args_of(root, 8).rampup_batch_size is None


@pytest.mark.parametrize("total", [9, 50, 400])
@pytest.mark.parametrize("ramp", [None, (4, 4, 200), (8, 8, 1000)])
def test_the_converted_total_reaches_the_same_samples(
    trained: Trained, total: int, ramp: tuple[int, int, int] | None
) -> None:
    """Counted batch by batch, as a trainer does."""
    before = look.inspect(Run.open(trained()))
    after = replace(before, batch_size=16, rampup=ramp)

    def walk(state: Any, iterations: int) -> int:
        sample = 64
        for _ in range(iterations):
            sample += rampup.batch_size(state, sample)
        return sample

    count, words = rampup.converted(before, after, total)
    goal = walk(before, total - 8)
    assert walk(after, count - 8) >= goal > walk(after, count - 9)
    assert words.startswith(f"8 of {total} iterations are done; the {goal - 64} samples")


def test_deepspeed_alone_is_told_by_its_config(tmp_path: Path) -> None:
    with deepspeed_engine.process_group():
        deepspeed_engine.make(tmp_path, deepspeed_engine.Options())
    before = snapshot(tmp_path)
    with pytest.raises(SurgeryError, match="does not decide batch_size") as refused:
        plan(Run.open(tmp_path), from_data({"set": {"batch_size": 8}}))
    assert '"train_batch_size": 8' in " ".join(refused.value.next)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch_size": 0}, "`set.batch_size` is 0"),
        ({"batch_size": 12.5}, "a whole number"),
        ({"rampup": [4, 4]}, "`set.rampup` is"),
        ({"rampup": [0, 4, 100]}, "`set.rampup` is"),
        ({"rampup": [4, 5, 100], "batch_size": 16}, "`set.rampup` is"),
        ({"rampup": [32, 4, 100], "batch_size": 16}, "`set.rampup` is"),
    ],
)
def test_a_slip_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        from_data({"set": values})
    assert said in f"{refused.value.what} {' '.join(refused.value.next)}"


def test_a_size_that_the_ranks_cannot_share_is_refused(trained: Trained) -> None:
    root = trained(ranks=2)
    before = snapshot(root)
    with pytest.raises(UsageError, match="not a multiple of micro_batch_size") as refused:
        plan(Run.open(root), from_data({"set": {"batch_size": 15}}))
    assert refused.value.next == ("batch_size=16",)
    with pytest.raises(UsageError, match=r"`set\.rampup` is"):
        plan(Run.open(root), from_data({"set": {"rampup": [4, 3, 100]}}))
    assert snapshot(root) == before
