"""Another batch size for Megatron-LM: checkpoint, flags, and what its functions make of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support import enums_by_name, megatron_legacy, newest_megatron
from tests.support.launch import REPO
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

MODEL = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "add_position_embedding": True,
    "micro_batch_size": 2,
}  # fmt: skip
BY_ITERATIONS: dict[str, Any] = {
    **MODEL, "train_iters": 1000, "lr_decay_iters": 1000, "lr_warmup_iters": 10,
    "lr_decay_samples": None, "lr_warmup_samples": None,
}  # fmt: skip


def ran(program: str, *words: object) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-W", "ignore", "-m", program, *map(str, words)]
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_counts_of_iterations_become_flags_for_the_same_samples(tmp_path: Path) -> None:
    """16 samples a batch until iteration 30 of 1000, then 32."""
    root = megatron_legacy.save(tmp_path / "run", **BY_ITERATIONS)
    before = snapshot(root)
    made = operate(root, {"set": {"batch_size": 32}})
    told = " ".join(made.warnings)
    assert made.promise is not None and made.before is not None
    assert made.promise == made.before  # rate and position count samples
    assert made.promise.consumed_samples == 480
    flags = dict(re.findall(r"--(global-batch-size|train-iters|lr-\w+-iters) (\d+)", told))
    assert flags == {
        "global-batch-size": "32", "train-iters": "515",
        "lr-decay-iters": "500", "lr-warmup-iters": "5",
    }  # fmt: skip
    assert 480 + (515 - 30) * 32 == 1000 * 16  # what the run was to train on
    assert 500 * 32 == 16_000 and 5 * 32 == 160  # the schedule of the file
    assert "30 + 485 = 515 (970 × 16 / 32)" in told
    assert "the schedule counts samples, so it stays: warm-up to 160, decay to 16000" in told
    shards = {change.file for change in made.changes}
    assert len(shards) == 4  # of every model-parallel rank
    take_back(root, before)


def test_a_run_by_samples_keeps_its_counts(tmp_path: Path) -> None:
    root = megatron_legacy.save(tmp_path / "run", **MODEL, train_samples=16_000)
    made = operate(root, {"set": {"batch_size": 64, "rampup": [16, 16, 3200]}})
    told = " ".join(made.warnings)
    assert "relaunch with --global-batch-size 64 --rampup-batch-size 16 16 3200" in told
    assert "iters" not in told
    state = Run.open(root).checkpoint(30).state()
    assert (state.batch_size, state.rampup) == (64, (16, 16, 3200))
    again = surgery.plan(Run.open(root), from_data({"set": {"batch_size": 64}}))
    assert again.empty and not any("relaunch" in line for line in again.warnings)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    root = megatron_legacy.save(tmp_path / "run", **MODEL)
    with pytest.raises(UsageError, match="not a multiple of micro_batch_size 2 x 2") as refused:
        surgery.plan(Run.open(root), from_data({"set": {"batch_size": 18}}))
    assert refused.value.next == ("batch_size=16",)
    newest = megatron_legacy.save(tmp_path / "newest", **MODEL, step_batch_size_schedule="0:16")
    with pytest.raises(SurgeryError, match="--step-batch-size-schedule"):
        surgery.plan(Run.open(newest), from_data({"set": {"batch_size": 32}}))


@pytest.mark.formats
@pytest.mark.witness("Megatron-LM legacy", "set batch_size", by="newest megatron-core")
def test_megatron_takes_the_size_from_its_command_line(tmp_path: Path) -> None:
    """No load sets it; where the saved one is compared, it is the one that was set."""
    if not newest_megatron.FOLDER.is_dir():
        pytest.skip("make test-formats installs the newest megatron-core")
    if enums_by_name.HERE:
        pytest.skip("Megatron can't load what it saves with this release of Python 3.11")
    root = megatron_legacy.save(tmp_path / "run", tensor=1, pipeline=1, **MODEL)
    told = ran("tests.support.megatron_args", root)
    assert told == {"None": None, "32": 32, "passed": [16], "consumed": 480}
    operate(root, {"set": {"batch_size": 32}})
    told = ran("tests.support.megatron_args", root)
    assert told == {"None": None, "32": 32, "passed": [32], "consumed": 480}
