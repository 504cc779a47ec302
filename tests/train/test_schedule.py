"""AnnealingLR against closed forms and the rates that a published run printed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from train.schedule import AnnealingLR


def schedule(**fields: Any) -> AnnealingLR:
    values = {
        "max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 100, "decay_steps": 500,
        "decay_style": "linear", **fields,
    }  # fmt: skip
    return AnnealingLR(SimpleNamespace(param_groups=[{}, {}]), **values)


def rate(samples: int, **fields: Any) -> float:
    one = schedule(**fields)
    one.step(samples)
    return one.get_lr()


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
def test_warm_up_is_linear_from_zero_in_samples(style: str) -> None:
    assert rate(0, decay_style=style) == 0.0
    assert rate(25, decay_style=style) == 0.25
    assert rate(100, decay_style=style) == 1.0


def test_linear_and_cosine_end_at_min_lr_and_stay_there() -> None:
    assert rate(300) == pytest.approx(0.55)
    assert rate(200, decay_style="cosine") == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    )
    for style in ("linear", "cosine"):
        assert rate(500, decay_style=style) == pytest.approx(0.1)
        assert rate(501, decay_style=style) == 0.1
        assert rate(10**9, decay_style=style) == 0.1


def test_constant_ignores_the_decay() -> None:
    assert rate(10**9, decay_style="constant") == 1.0


def test_no_warm_up_starts_at_max_lr() -> None:
    assert rate(0, warmup_steps=0) == 1.0


def test_the_rates_that_the_104b_run_printed_around_its_surgery() -> None:
    """BigScience tr8b: 5.999E-05 before, 5.842E-05 after --min-lr and --lr-decay-samples."""
    run = {"max_lr": 6e-5, "warmup_steps": 216_320, "decay_style": "cosine"}
    before = rate(1_519_744, min_lr=6e-6, decay_steps=126_953_125, **run)
    after = rate(1_519_744, min_lr=6e-7, decay_steps=12_695_312, **run)
    assert (f"{before:.3E}", f"{after:.3E}") == ("5.999E-05", "5.842E-05")


def test_step_adds_the_batch_and_writes_every_group() -> None:
    one = schedule()
    one.step(8, token_num=256)
    one.step(8, token_num=512)
    assert (one.num_steps, one.num_tokens) == (16, 512)
    assert [group["lr"] for group in one.optimizer.param_groups] == [0.16, 0.16]


def test_the_state_has_megatrons_keys_and_wins_whole() -> None:
    saved = schedule(decay_style="cosine")
    saved.step(250, token_num=1000)
    state = saved.state_dict()
    assert list(state) == [
        "max_lr", "warmup_steps", "num_steps", "warmup_tokens", "num_tokens", "decay_style",
        "decay_steps", "min_lr",
    ]  # fmt: skip
    other = schedule(max_lr=7.0, min_lr=3.0, warmup_steps=1, decay_steps=2)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.optimizer.param_groups[1]["lr"] == saved.get_lr()
