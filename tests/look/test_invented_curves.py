"""What `advise` says of curves that have the statistics of real ones: seeds never tuned on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon.logs.curves import Curve, Curves
from ckptsurgeon.look.advise import DIVERGED, HEALTHY, RECOVERED, judge
from tests.look.invented_curves import HELD_OUT, TUNING, climbs, comes_back, invented


def verdict(seed: int) -> str:
    return judge(Curves(invented(seed).branch)).verdict


def near(seed: int) -> bool:
    """Whether the onset is within 1 % of the run, or 3 points in a short one, of where the loss
    left its course; a slow rise may be seen when a tenth of it has been made."""
    made = invented(seed)
    spike = judge(Curves(made.branch)).spike
    assert spike is not None and made.event is not None and made.risen is not None
    steps = made.branch["loss"].steps
    slack = max(0.01 * len(steps), 3) * (steps[1] - steps[0])
    return bool(made.event - slack <= spike.first <= made.risen + slack)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("seed", HELD_OUT)
def test_nothing_healthy_is_ill_and_nothing_ill_is_missed(seed: int) -> None:
    if invented(seed).event is None:
        assert verdict(seed) not in (DIVERGED, RECOVERED)
    else:
        assert verdict(seed) == DIVERGED


@pytest.mark.long
def test_the_onset_is_within_one_percent() -> None:
    sick = [seed for seed in HELD_OUT if invented(seed).event is not None]
    assert [seed for seed in sick if not near(seed)] == []


FRESH = range(6_000_000, 6_002_000)


@pytest.mark.slow
def test_of_a_thousand_healthy_curves_hardly_one_is_ill() -> None:
    healthy = [seed for seed in FRESH if invented(seed).event is None]
    assert sum(verdict(seed) in (DIVERGED, RECOVERED) for seed in healthy) <= 1


@pytest.mark.slow
def test_of_a_thousand_divergences_hardly_one_is_missed_or_misdated() -> None:
    """Most of what is misdated has a spike right before the break."""
    sick = [seed for seed in FRESH if invented(seed).event is not None]
    found = [seed for seed in sick if verdict(seed) == DIVERGED]
    assert len(sick) - len(found) <= 1
    assert sum(not near(seed) for seed in found) <= 0.01 * len(found)


@pytest.mark.parametrize("seed", [5_000_407, 5_001_297, 5_001_425, 5_002_057, 5_002_215, 5_002_525])
def test_two_spikes_on_the_crest_of_a_wave_are_no_divergence_that_came_back(seed: int) -> None:
    """Each lasts seven points at most, and good points lie between them."""
    assert verdict(seed) == HEALTHY


@pytest.mark.parametrize("seed", range(5))
def test_a_jump_right_after_a_steep_noisy_start_is_found(seed: int) -> None:
    """The noise of the start is not that of the course which the loss left."""
    steps = np.arange(1, 231)
    noise = np.random.default_rng(seed).normal(0, 1, 230)
    loss = 1.0 + 2.5 * np.exp(-steps / 25) + np.where(steps < 80, 0.15, 0.03) * noise
    loss[80:] += 0.6
    assert judge(Curves({"loss": Curve(steps, loss, np.full(230, math.nan))})).verdict == DIVERGED


def onset(seed: int, shape: Any) -> int:
    """The step of the onset in a calm loss of 600 points to which `shape(steps)` is added."""
    steps = np.arange(1, 601)
    loss = 2.5 + np.random.default_rng(seed).normal(0, 0.03, 600) + shape(steps)
    told = judge(Curves({"loss": Curve(steps, loss, np.full(600, math.nan))}))
    assert told.verdict == DIVERGED and told.spike is not None
    return told.spike.first


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_that_was_over_before_the_loss_broke_does_not_date_it(seed: int) -> None:
    def shape(t: Any) -> Any:
        return 2.0 * ((t >= 290) & (t < 294)) + 1.5 * (t >= 300)

    assert abs(onset(seed, shape) - 300) <= 3


@pytest.mark.parametrize("breaks_to", [1.5, math.inf])
@pytest.mark.parametrize("good", [2, 3, 5])
def test_a_spike_right_before_the_break_does_not_date_it(good: int, breaks_to: float) -> None:
    def shape(t: Any) -> Any:
        spike = 2.0 * ((t >= 293 - good) & (t < 300 - good))
        return np.where(t >= 300, breaks_to, spike)

    for seed in range(5):
        assert onset(seed, shape) == 300


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_in_a_slow_rise_does_not_date_it(seed: int) -> None:
    def shape(t: Any) -> Any:
        rise = 2.0 * np.clip((t - 300) / 60, 0, 1)
        return rise + 2.0 * ((t >= 345) & (t < 352))

    assert abs(onset(seed, shape) - 300) <= 10


@pytest.mark.parametrize("points", [3, 5])
@pytest.mark.parametrize("at", [90, 300])
def test_a_rise_of_some_points_is_dated_by_its_first(points: int, at: int) -> None:
    """Also where only its last points are high enough for a rule."""
    for seed in range(5):
        assert abs(onset(seed, lambda t: 0.8 * np.clip((t - at + 1) / points, 0, 1)) - at) <= 1


def test_a_scale_that_collapsed_dates_the_break_that_follows() -> None:
    """Ten halvings within 20 points, each of 200 steps, and the loss is no number 20 points later;
    not where the scale rises again between the two."""
    steps = np.arange(1, 301) * 200
    loss = 2.5 + np.random.default_rng(0).normal(0, 0.03, 300)
    loss[240:] = math.nan
    scale = 2.0 ** (16 - np.clip((np.arange(300) - 198) // 2, 0, 10))
    walls = np.full(300, math.nan)
    curves = {"loss": Curve(steps, loss, walls), "loss-scale": Curve(steps, scale, walls)}
    told = judge(Curves(curves))
    assert told.verdict == DIVERGED and told.spike is not None
    assert (told.spike.first, told.spike.signal) == (201 * 200, "loss-scale")
    scale[230:] *= 2
    told = judge(Curves(curves))
    assert told.spike is not None and told.spike.first == 241 * 200


@given(st.integers(0, 2**16), st.integers(30, 250), st.sampled_from([1.0, 1.3, 1.5]))
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@pytest.mark.long
def test_a_slow_rise_is_dated_by_its_foot(seed: int, length: int, power: float) -> None:
    """To a tenth of the rise after it began, of which noise hides the first part; hardly before."""

    def shape(t: Any) -> Any:
        return 2.0 * np.clip((t - 300) / length, 0, 1) ** power

    assert 300 - 6 <= onset(seed, shape) <= 300 + 6 + 0.1 * length


@given(st.integers(0, 2**16), st.floats(4, 20), st.floats(0.2, 1.5))
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
def test_a_loss_that_grows_and_grows_is_dated_where_it_began(
    seed: int, slowness: float, height: float
) -> None:
    """Not where it makes most of its rise, which is at the end: by then it is a thousandfold."""

    def shape(t: Any) -> Any:
        return height * np.expm1(np.maximum(t - 300, 0) / slowness)

    assert 300 - 6 <= onset(seed, shape) <= 300 + slowness


@pytest.mark.parametrize("seed", range(5))
def test_other_data_that_raised_the_loss_before_do_not_date_it(seed: int) -> None:
    def shape(t: Any) -> Any:
        other = 0.4 * ((t >= 200) & (t < 216)) + 0.15 * (t >= 216)
        return other + 2.0 * np.clip((t - 400) / 40, 0, 1)

    assert abs(onset(seed, shape) - 400) <= 10


SHAPES: dict[str, Any] = {"deadline": None, "database": None, "derandomize": True}


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, **SHAPES)
def test_a_spike_that_comes_back_by_itself_is_no_divergence(seed: int) -> None:
    assert judge(Curves(comes_back(seed))).verdict != DIVERGED


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, **SHAPES)
@pytest.mark.long
def test_a_slow_climb_over_a_long_log_is_found(seed: int) -> None:
    """It is not called before it turns, by more than 2 %, nor when most of it is over: it is seen
    once it is higher than the waves of the data, and nothing in the curve says more."""
    branch, turn = climbs(seed)
    told = judge(Curves(branch))
    assert told.verdict == DIVERGED and told.spike is not None
    last = int(branch["loss"].steps[-1])
    assert turn - 0.02 * last <= told.spike.first <= turn + 0.5 * (last - turn)


@pytest.mark.slow
def test_the_seeds_that_the_rules_were_tuned_on() -> None:
    healthy = [seed for seed in TUNING if invented(seed).event is None]
    sick = [seed for seed in TUNING if invented(seed).event is not None]
    assert not [seed for seed in healthy if verdict(seed) in (DIVERGED, RECOVERED)]
    assert sum(verdict(seed) != DIVERGED for seed in sick) <= 1
