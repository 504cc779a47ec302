"""Losses that rise and are healthy: two models that play against each other, a policy's penalty."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon.logs.curves import Curve, Curves
from ckptsurgeon.look.advise import DIVERGED, OPEN, RECOVERED, UNKNOWN, judge

LAWS: dict[str, Any] = {"max_examples": 40, "deadline": None, "database": None, "derandomize": True}


def told(loss: Any, rule: str | None = None) -> Any:
    steps = np.arange(1, len(loss) + 1)
    return judge(Curves({"loss": Curve(steps, loss, np.full(len(loss), math.nan))}), rule)


def swinging(seed: int, period: int, swings: float, height: float) -> Any:
    """About 1, from 1 - height to 1 + height."""
    t = np.arange(int(period * swings))
    noise = np.random.default_rng(seed).normal(0, 0.08, len(t))
    return 1 + height * np.sin(2 * np.pi * t / period) + noise


SWINGS = st.tuples(
    st.integers(0, 2**16), st.integers(150, 600), st.floats(4, 9), st.floats(0.1, 0.5)
)


@given(SWINGS)
@settings(**LAWS)
def test_what_swings_has_not_diverged_wherever_its_log_ends(made: tuple[Any, ...]) -> None:
    """From its fourth swing on; of one or two nothing says that they are the course of the run."""
    assert told(swinging(*made)).verdict not in (DIVERGED, RECOVERED)


@given(SWINGS)
@settings(**LAWS)
def test_what_leaves_its_swings_has_diverged(made: tuple[Any, ...]) -> None:
    seed, period, swings, height = made
    loss = swinging(seed, period, swings, height)
    after = np.random.default_rng(seed).normal(1 + 4 * height, 0.08, 150)
    said = told(np.concatenate([loss, after]))
    assert said.verdict == DIVERGED and said.spike is not None
    assert len(loss) - period <= said.spike.first <= len(loss) + 3


@given(st.integers(0, 2**16), st.integers(200, 500))
@settings(**LAWS)
def test_what_stays_up_longer_than_its_swings_has_diverged(seed: int, period: int) -> None:
    loss = swinging(seed, period, 4.25, 0.4)
    after = np.random.default_rng(seed).normal(1.4, 0.08, period)
    assert told(np.concatenate([loss, after])).verdict == DIVERGED


def test_of_an_open_swing_like_one_before_it_is_too_early_to_tell() -> None:
    said = [told(swinging(1, 400, swings, 0.4)).verdict for swings in (0.4, 1.5, 1.8)]
    assert said == [DIVERGED, OPEN, RECOVERED]


def test_what_led_the_loss_is_no_earlier_spike() -> None:
    """The norm moves at 328 and 329, the loss at 330: one spike."""
    t = np.arange(1, 501)
    dice = np.random.default_rng(3)
    loss = 2 + 3 / np.sqrt(t) + dice.normal(0, 0.04, 500) + 4.0 * (t >= 330)
    norm = np.exp(dice.normal(0, 0.1, 500)) * np.where(t >= 328, 8, 1)
    walls = np.full(500, math.nan)
    said = judge(Curves({"loss": Curve(t, loss, walls), "grad-norm": Curve(t, norm, walls)}))
    assert [spike.first for spike in said.spikes] == [328]


def grown(seed: int, points: int, top: float, share: float) -> Any:
    """From 0 to `top`, ever more slowly, with noise as a share of it."""
    t = np.arange(points)
    noise = np.random.default_rng(seed).normal(0, share * top, points)
    return top * (1 - np.exp(-t / points * 3)) + noise - share * top * (t == 0)


GROWN = st.tuples(
    st.integers(0, 2**16), st.integers(200, 2000), st.floats(1e-3, 1), st.floats(0.15, 0.5)
)


@given(GROWN)
@settings(**LAWS)
def test_what_grows_from_0_is_not_called_diverged(made: tuple[Any, ...]) -> None:
    """A rule that was asked for judges it; and as soon as it jumps or is no number it diverged."""
    loss = grown(*made)
    assert told(loss).verdict not in (DIVERGED, RECOVERED)
    jump = np.where(np.arange(len(loss)) >= len(loss) * 0.3 + 50, 30 * made[2], 0.0)
    lost = np.where(jump > 0, math.nan, loss)
    if np.count_nonzero(jump) > 120:
        assert told(loss + jump).verdict == DIVERGED
    assert told(lost).verdict == DIVERGED


def test_what_cannot_be_told_says_so_and_names_the_rule_that_judges_it() -> None:
    loss = grown(1, 600, 0.05, 0.2)
    said = told(loss)
    assert said.verdict == UNKNOWN and "--rule cusum" in said.reason
    assert told(loss, "cusum").verdict == DIVERGED
