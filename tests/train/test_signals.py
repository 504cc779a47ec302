"""What people look at beside the loss: activations of the last layer, and how often is clipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.in_process import InProcess
from tests.support.trained_run import step_back
from train import trainer


def series(run: Path, name: str) -> dict[str, list[tuple[int, float]]]:
    """Axis → step and value of each event of a tag of Megatron's form."""
    events = EventAccumulator(str(run / "tensorboard"), {"tensors": 0})
    events.Reload()
    return {
        axis: [
            (e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(f"{name}/{name}{axis}")
        ]
        for axis in ("", " vs samples", " vs tokens")
    }


@pytest.mark.parametrize("overrides", [[], ["dtype=bf16"], ["micro_batch_size=2"]], ids=" ".join)
def test_the_activation_norm_is_that_of_what_the_last_layer_hands_on(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    split = ["split=8,1,1", "eval_interval=1", "eval_iters=1"]
    training = in_process.prepare(tmp_path, *overrides, *split, "train_iters=2")
    model, seen = training.engine.module, []

    def hand_on(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if model.training:  # a validation is not a step
            seen.append(output.detach().float().square().sum(-1).sqrt())

    model.layers[-1].register_forward_hook(hand_on)
    trainer.train(training, in_process.said.append)
    found = series(tmp_path, "activation-norm")
    expected = [
        float(torch.cat(part).mean()) for part in (seen[: len(seen) // 2], seen[len(seen) // 2 :])
    ]
    assert [value for _, value in found[""]] == pytest.approx(expected, rel=1e-5)
    assert [[step for step, _ in found[axis]] for axis in found] == [[1, 2], [8, 16], [256, 512]]


def test_the_share_of_clipped_steps_goes_on_at_a_resume_and_back_at_a_rollback(
    in_process: InProcess, tmp_path: Path
) -> None:
    norms = "skip_grad_norm=0", "lr_warmup_samples=0"
    in_process.train(tmp_path / "probe", *norms, "clip_grad=1e6")
    limit = sorted(norm_of(in_process.said).values())[2] + 1e-3  # the three smallest pass
    run = tmp_path / "run"
    words = [*norms, f"clip_grad={limit}", "save_interval=2"]
    in_process.train(run, *words)
    clipped = {i: norm > limit for i, norm in norm_of(in_process.said).items()}
    assert 0 < sum(clipped.values()) < 6
    shares = [sum(list(clipped.values())[:i]) / i for i in range(1, 7)]
    assert [value for _, value in series(run, "clipped-steps")[""]] == pytest.approx(shares)
    step_back(run, 4)
    in_process.train(run, *words)
    told = re.findall(r"clipped steps: (\S+) \|", "\n".join(in_process.said))
    assert [float(share) for share in told] == pytest.approx(shares[4:], abs=1e-4)


def norm_of(said: list[str]) -> dict[int, float]:
    found = re.findall(r"iteration +(\d+)/.*\| grad norm: (\S+) \|", "\n".join(said))
    return {int(iteration): float(norm) for iteration, norm in found}


def test_a_step_left_out_is_no_update_and_no_clipping_has_no_share(
    in_process: InProcess, tmp_path: Path
) -> None:
    training = in_process.prepare(tmp_path / "skip", "skip_grad_norm=1e-9", "train_iters=2")
    trainer.train(training, in_process.said.append)
    assert (training.progress.updates, training.progress.clipped_updates) == (0, 0)
    training = in_process.prepare(tmp_path / "off", "clip_grad=0", "train_iters=2")
    trainer.train(training, in_process.said.append)
    assert (training.progress.updates, training.progress.clipped_updates) == (2, 0)
    assert "clipped steps" not in "\n".join(in_process.said[-2:])
