"""Skipped iterations under batch-size ramp-up: data passes, the scheduler and Adam do not move."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.support.launch import launch
from tests.support.trained_run import losses


def test_skip_and_rampup_advance_data_but_not_the_optimizer(tmp_path: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    done = launch(
        "--config=train/configs/tiny.yaml", f"save={run}", f"data={corpus}", "--from-scratch",
        "micro_batch_size=2", "rampup_batch_size=[4,4,16]", "global_batch_size=8",
        "skip_train_iteration_range=[[3,4]]", "lr_warmup_samples=100", "train_iters=7",
        "save_interval=4",
    )  # fmt: skip
    found = re.findall(
        r"iteration +(\d+)/.*consumed samples: +(\d+) .*learning rate: (\S+) .*size: +(\d+) ",
        done.stdout,
    )
    # 4 + 4 trained, 4 + 4 skipped, then 8 from sample 16 on; lr is 1e-3 x trained samples / 100.
    assert [(int(i), int(n), float(lr), int(b)) for i, n, lr, b in found] == [
        (1, 4, 0.0, 4), (2, 8, 4e-5, 4),
        (5, 24, 8e-5, 8), (6, 32, 1.6e-4, 8), (7, 40, 2.4e-4, 8),
    ]  # fmt: skip
    assert " iterations 3-4 are skipped" in done.stdout
    assert sorted(losses(done.stdout)) == [1, 2, 5, 6, 7]
    inside, end = (
        torch.load(run / f"global_step{step}/mp_rank_00_model_states.pt", weights_only=False)
        for step in (4, 7)
    )
    assert inside["lr_scheduler"]["num_steps"] == 8 and inside["global_steps"] == 2
    assert inside["args"].consumed_train_samples == 16 and inside["tokens"] == 16 * 32
    assert inside["skip_train_iteration_range"] == [[3, 4]]
    assert (end["iteration"], end["global_steps"]) == (7, 5)
    assert end["lr_scheduler"]["num_tokens"] == end["tokens"] == 40 * 32
