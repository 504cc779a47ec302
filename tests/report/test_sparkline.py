"""The loss in `status`: its columns fit, they move no note of another row, and a loss that left its
course is named first and stands high."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon.logs.curves import Curves
from ckptsurgeon.look import loss_verdict
from ckptsurgeon.look.advise import DIVERGED, judge, rises
from ckptsurgeon.look.loss_tail import LossTail
from ckptsurgeon.report.sparkline import BARS, NO_NUMBER, SAVED, WIDTH, headline, sparkline
from ckptsurgeon.report.style import Row, Style, table
from tests.look.invented_curves import HELD_OUT, invented
from tests.support.counted import calls

SEEN = LossTail(range(1, 401), [4 - step / 200 for step in range(1, 401)])
SAVES = range(5, 401, 5)
OTHERS = [Row("weight decay", "0.1, 0", "one per param group"), Row("clip", "1")]


@pytest.mark.parametrize("width", [32, 40, 60, 80, 200])
def test_the_picture_stays_whole_and_its_ticks_stand_below_it(width: int) -> None:
    style = Style(width)
    lines = table([*OTHERS, *sparkline(SEEN, SAVES, width - 16)], style)
    assert all(len(line) <= width for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("  loss "))
    picture, ticks = (line[16:] for line in lines[at : at + 2])
    assert len(picture) == min(WIDTH, width - 16) and " " not in picture
    assert len(ticks) == len(picture) and ticks.count(SAVED) == 8  # of the last tenth


@pytest.mark.parametrize("width", [60, 80, 200])
def test_notes_of_other_rows_stay_where_they_are(width: int) -> None:
    alone = table(OTHERS, Style(width))
    assert table([*OTHERS, *sparkline(SEEN, SAVES, width - 16)], Style(width))[:2] == alone


def read(seed: int, points: int) -> tuple[LossTail, bool]:
    """The last points of an invented curve, and whether its loss left its course in these."""
    made = invented(seed)
    loss = made.branch["loss"]
    seen = LossTail(loss.steps[-points:].tolist(), loss.values[-points:].tolist())
    before = sum(step < (made.event or 0) for step in seen.steps)
    return seen, before >= 2 * loss_verdict.SPAN  # fewer points are no level to rise from


@settings(max_examples=60, deadline=None)
@given(seed=st.sampled_from(HELD_OUT), points=st.integers(200, 6000))
def test_what_left_its_course_is_named_and_stands_high(seed: int, points: int) -> None:
    """Healthy curves have no headline, and what has none lies low."""
    made, (seen, left) = invented(seed), read(seed, points)
    said, line = headline(seen), sparkline(seen, ())[0].text
    if made.event is None:
        assert said is None
    if left:
        assert said is not None
        high = [NO_NUMBER if bar == NO_NUMBER else BARS.index(bar) for bar in line if bar != " "]
        assert NO_NUMBER in high or statistics.median(high) >= len(BARS) / 2
    if said is not None and "diverged" in said[0]:
        assert judge(Curves(made.branch)).verdict == DIVERGED


@settings(max_examples=50, deadline=None)
@given(
    points=st.integers(50, 2000),
    lost=st.lists(st.tuples(st.floats(0, 1), st.sampled_from([math.nan, math.inf])), min_size=1),
)
def test_a_loss_that_is_no_number_is_always_named_with_its_step(
    points: int, lost: list[tuple[float, float]]
) -> None:
    values = [2.0] * points
    for share, value in lost:
        values[min(points - 1, int(share * points))] = value
    steps = range(10, 10 * points + 1, 10)
    said = headline(LossTail(steps, values))
    assert said is not None and ("NaN" in said[0] or "Inf" in said[0])
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    assert any(str(step) in said[0].split() for step in bad)
    last = sparkline(LossTail(steps, values), ())
    assert (NO_NUMBER in last[0].text) == any(step > 0.9 * steps[-1] or step in steps[-WIDTH:]
                                              for step in bad)  # fmt: skip


def test_the_last_tenth_alone_is_drawn() -> None:
    """A divergence at the end is not squeezed by the fall at the beginning."""
    fell = [2 + 9 / (1 + step / 20) for step in range(1, 2001)]
    healthy = sparkline(LossTail(range(1, 2001), fell), ())
    assert set(healthy[0].text) == {BARS[0]} and "steps 1801 to 2000" in healthy[1].text
    ill = fell[:-60] + [value * 1.5 for value in fell[-60:]]
    line = sparkline(LossTail(range(1, 2001), ill), ())[0].text
    assert line[:20] == BARS[0] * 20 and line[-10:] == BARS[-1] * 10


def test_it_costs_as_much_a_point_in_a_long_log_as_in_a_short_one() -> None:
    def cost(points: int) -> int:
        seen = LossTail(range(1, points + 1), [2.0] * points, whole=True)
        return calls(lambda: (headline(seen), sparkline(seen, range(1, points + 1, 10))))

    cost(50)
    assert cost(16_000) - cost(8_000) <= 2.4 * (cost(8_000) - cost(4_000))


def test_what_matters_is_what_matters_to_advise() -> None:
    assert (loss_verdict.SHARE, loss_verdict.LEARNT, loss_verdict.NOISES) == (
        rises.SHARE,
        rises.LEARNT,
        rises.NOISES,
    )
