"""A resumed run is the uninterrupted one; its first line is what the live engine holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import Trained
from tests.support.launch import launch
from tests.support.snapshot import snapshot
from tests.support.trained_run import edit, first_line, losses, step_back

KEYS = [
    "step", "lr", "betas", "eps", "weight_decay", "adam_step", "loss_scale", "clip_grad",
    "consumed_samples", "skip", "seed", "rewarm",
]  # fmt: skip


def uninterrupted(run: Path) -> dict[int, str]:
    """The losses that the first process of the run logged, in the digits that it printed."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    series = events.Tensors("lm-loss-training/lm loss")
    return {e.step: f"{float(torch.tensor(e.tensor_proto.float_val)[0]):.6E}" for e in series}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.long
def test_a_resumed_run_repeats_the_losses_of_the_uninterrupted_one(
    trained: Trained, ranks: int
) -> None:
    run = trained(ranks=ranks)
    expected = uninterrupted(run)
    step_back(run, 4)
    done = launch("--config", str(run / "train.yaml"), "lr=0.5", ranks=ranks)
    line = first_line(done.stdout)
    assert list(line) == KEYS
    assert (line["step"], line["adam_step"], line["consumed_samples"]) == (5, 4, 32)
    assert losses(done.stdout) == {i: expected[i] for i in (5, 6, 7, 8)}
    assert "lr: config 0.5, checkpoint 0.001: the checkpoint wins" in done.stderr
    assert (run / "latest").read_text() == "global_step8"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "8"
    assert not (run / "trainer.pid").exists()


def test_a_run_that_is_at_its_end_says_so(trained: Trained) -> None:
    run = trained()
    done = launch("--config", str(run / "train.yaml"))
    assert "\n nothing to train: step 8 is saved, and train_iters=8\n" in done.stdout
    assert losses(done.stdout) == {} and (run / "latest").read_text() == "global_step8"


def live(run: Path, *arguments: str, **keywords: Any) -> dict[str, Any]:
    done = launch(
        "--config", str(run / "train.yaml"), "--exit-after-first-line", *arguments, **keywords
    )
    assert len(done.stdout.splitlines()) == 1
    return first_line(done.stdout)


def test_the_first_line_is_the_live_engine_and_asking_for_it_changes_nothing(
    trained: Trained,
) -> None:
    run = trained()
    checkpoint = step_back(run, 4)

    def shard(content: dict[str, Any]) -> None:
        state = content["optimizer_state_dict"]
        state["clip_grad"] = 0.25
        for group in state["base_optimizer_state"]["param_groups"]:
            group.update(betas=(0.5, 0.9), eps=1e-6, lr=7e-4)
        for moments in state["base_optimizer_state"]["state"].values():
            moments["step"].fill_(2)

    def client(content: dict[str, Any]) -> None:
        content["skip_train_iteration_range"] = [[6, 7]]
        content["args"].seed = 99
        content["args"].adam_beta1 = 0.7  # no place that anything reads

    edit(checkpoint / "zero_pp_rank_0_mp_rank_00_optim_states.pt", shard)
    edit(checkpoint / "mp_rank_00_model_states.pt", client)
    before = snapshot(run)
    assert live(run) == {
        "step": 5,
        "lr": 7e-4,  # of the group: the scheduler writes its own only after this step
        "betas": [0.5, 0.9],
        "eps": 1e-6,
        "weight_decay": [0.1, 0.0],
        "adam_step": 2,
        "loss_scale": 1.0,
        "clip_grad": 0.25,
        "consumed_samples": 32,
        "skip": [[6, 7]],
        "seed": 99,
        "rewarm": [],
    }
    assert snapshot(run) == before


def test_without_zero_the_clip_of_the_saved_args_is_live(trained: Trained) -> None:
    run = trained(zero=0)
    checkpoint = step_back(run, 4)

    def client(content: dict[str, Any]) -> None:
        content["args"].clip_grad = 0.125
        content["optimizer"]["param_groups"][1]["weight_decay"] = 0.5

    edit(checkpoint / "mp_rank_00_model_states.pt", client)
    line = live(run)
    assert (line["clip_grad"], line["adam_step"]) == (0.125, 4)
    assert line["weight_decay"] == [0.1, 0.5]


def test_ranks_that_disagree_stop_the_run_and_are_named(trained: Trained) -> None:
    run = trained(ranks=2)
    checkpoint = step_back(run, 4)

    def shard(content: dict[str, Any]) -> None:
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group["betas"] = (0.5, 0.9)

    edit(checkpoint / "zero_pp_rank_1_mp_rank_00_optim_states.pt", shard)
    done = launch("--config", str(run / "train.yaml"), ranks=2, status=1)
    assert "the ranks disagree on betas: rank 0 [0.9, 0.95], rank 1 [0.5, 0.9]" in done.stderr
    assert done.stdout == ""


def test_a_fresh_16_bit_run_has_taken_no_adam_step(tmp_path: Path, corpus: Path) -> None:
    """DeepSpeed's wrapper steps once at construction; the trainer takes that back."""
    done = launch(
        "--config=train/configs/tiny.yaml", f"save={tmp_path / 'run'}", f"data={corpus}",
        "zero_stage=0", "dtype=bf16", "--from-scratch", "--exit-after-first-line",
    )  # fmt: skip
    line = first_line(done.stdout)
    assert (line["step"], line["adam_step"], line["loss_scale"]) == (1, 0, 1.0)
    assert not (tmp_path / "run").exists()
