"""AnnealingLR against closed forms and the rates that a published run printed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.formats.schedules.annealing import learning_rate
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data
from tests.support.in_process import InProcess
from train.config import DECAY_STYLES, WSD_STYLES
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


def test_one_minus_the_root_falls_fast_first() -> None:
    """Hägele et al. 2024, arXiv:2405.18392: (1 - sqrt(share)) of the way is left."""
    assert rate(200, decay_style="1-sqrt") == pytest.approx(0.1 + 0.9 * (1 - 0.5))
    assert rate(325, decay_style="1-sqrt") == pytest.approx(0.1 + 0.9 * (1 - 0.75))
    assert [rate(n, decay_style="1-sqrt") for n in (100, 500, 501)] == [1.0, 0.1, 0.1]


@pytest.mark.parametrize(
    ("style", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1),
     ("minus_sqrt", 1 - 0.5**0.5)],
)  # fmt: skip
def test_wsd_is_constant_but_for_its_last_samples(style: str, half: float) -> None:
    wsd = {"decay_style": "WSD", "wsd_decay_steps": 200, "lr_wsd_decay_style": style}
    assert [rate(n, **wsd) for n in (50, 100, 101, 299, 300)] == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rate(400, **wsd) == pytest.approx(0.1 + 0.9 * half)
    assert [rate(n, **wsd) for n in (500, 501)] == [pytest.approx(0.1), 0.1]


def wsd_styles() -> list[dict[str, Any]]:
    return [
        {"decay_style": "WSD", "wsd_decay_steps": 150, "lr_wsd_decay_style": style}
        for style in WSD_STYLES
    ]


@pytest.mark.formats
@pytest.mark.parametrize("fields", wsd_styles(), ids=WSD_STYLES)
def test_wsd_is_megatrons(fields: dict[str, Any]) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    real = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[{}]), init_lr=0.0, max_lr=1.0, min_lr=0.1,
        lr_warmup_steps=100, lr_decay_steps=500, lr_decay_style="WSD", start_wd=0.1, end_wd=0.1,
        wd_incr_steps=1, wd_incr_style="constant", wsd_decay_steps=150,
        lr_wsd_decay_style=fields["lr_wsd_decay_style"],
    )  # fmt: skip
    for samples in range(505):
        real.num_steps = samples
        assert rate(samples, **fields) == pytest.approx(real.get_lr({}), rel=1e-15)


@pytest.mark.parametrize(
    "fields",
    [*({"decay_style": style} for style in DECAY_STYLES if style != "WSD"), *wsd_styles()],
    ids=str,
)
def test_the_surgeon_computes_every_rate_alike(fields: dict[str, Any]) -> None:
    one = schedule(**fields)
    for _ in range(520):
        assert learning_rate(one.state_dict()) == pytest.approx(one.get_lr(), rel=1e-15)
        one.step(1)


@pytest.mark.parametrize(
    "overrides",
    [["lr_decay_style=1-sqrt"],
     ["lr_decay_style=WSD", "lr_wsd_decay_samples=24", "lr_wsd_decay_style=minus_sqrt"]],
    ids=["1-sqrt", "WSD"],
)  # fmt: skip
def test_a_surgery_and_a_resume_keep_the_decay(
    in_process: InProcess, tmp_path: Path, overrides: list[str]
) -> None:
    words = [*overrides, "lr_decay_samples=48", "lr_warmup_samples=8"]
    in_process.train(tmp_path, *words)
    run = Run.open(tmp_path)
    wanted = plan(run, from_data({"rollback": {"to": 4}, "set": {"lr": 5e-4}}))
    surgery.apply(run, wanted)
    assert wanted.promise is not None
    line = in_process.resumed_line(tmp_path, "lr_decay_samples=48")
    assert compare(wanted.promise, line) == []
    share = (32 - 24) / 24 if "WSD" in overrides[0] else (32 - 8) / 40
    assert json.loads(line)["lr"] == pytest.approx(1e-4 + 4e-4 * (1 - share**0.5))


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
    stable = {"decay_style": "WSD", "wsd_decay_steps": 90, "lr_wsd_decay_style": "linear"}
    other.load_state_dict(schedule(**stable).state_dict())
    assert other.state_dict() == {**schedule().state_dict(), **stable}
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.optimizer.param_groups[1]["lr"] == saved.get_lr()
