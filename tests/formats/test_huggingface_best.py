"""The Trainer's best model and early stopping after a rollback: those of the step gone back to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import surgery
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.snapshot import snapshot

pytestmark = [
    pytest.mark.formats,
    pytest.mark.usefixtures("accelerate_on_cpu"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]


class Words(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(output: Path, losses: Mapping[int, float], *, resume: bool = False) -> Any:
    """The state that a real Trainer ends with, which evaluates and saves every 2 of 12 steps, with
    these losses, and stops early after 2 that are no better."""
    from transformers import (
        EarlyStoppingCallback,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
    )

    class Given(Trainer):
        def _evaluate(self, *args: Any, **more: Any) -> dict[str, float]:
            step = self.state.global_step
            metrics = {"eval_loss": losses[step]}
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
            return metrics

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=12, save_steps=2, save_strategy="steps", eval_steps=2,
        eval_strategy="steps", per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        use_cpu=True, metric_for_best_model="eval_loss", greater_is_better=False,
        load_best_model_at_end=True, logging_steps=1, restore_callback_states_from_checkpoint=True,
    )  # fmt: skip
    real = Given(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Words(), eval_dataset=Words(),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    real.train(resume_from_checkpoint=resume)
    return real.state


def test_the_trainer_goes_on_with_the_best_of_the_step_gone_back_to(tmp_path: Path) -> None:
    """Step 6 was the best, and one evaluation after it was worse. After a rollback to 4 that one is
    the best again, and two worse ones are needed to stop, not one."""
    run = tmp_path / "run"
    first = train(run, {2: 3.0, 4: 2.0, 6: 1.0, 8: 1.5, 10: 1.6, 12: 9.0})
    assert (first.global_step, first.best_metric) == (10, 1.0)
    before = snapshot(run)
    plan = surgery.plan(Run.open(run), from_data({"rollback": {"to": 4}}))
    surgery.apply(Run.open(run), plan)
    saved = json.loads((run / "checkpoint-4/trainer_state.json").read_text())
    assert (saved["best_metric"], saved["best_global_step"]) == (2.0, 4)
    assert [row["step"] for row in saved["log_history"]][-1] == 4
    second = train(run, {6: 2.5, 8: 2.6, 10: 9.0}, resume=True)
    assert (second.global_step, second.best_metric, second.best_global_step) == (8, 2.0, 4)
    assert Path(second.best_model_checkpoint).name == "checkpoint-4"
    steps = [row["step"] for row in second.log_history if "loss" in row]
    assert steps == list(range(1, 9))
    surgery.apply(Run.open(run), surgery.plan_undo(Run.open(run)))
    assert snapshot(run) == before
