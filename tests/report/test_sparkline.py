"""The loss in `status`: its columns fit, and they move no note of another row."""

from __future__ import annotations

import pytest

from ckptsurgeon.look.glance import Glance
from ckptsurgeon.report.sparkline import SAVED, WIDTH, sparkline
from ckptsurgeon.report.style import Row, Style, table

SEEN = Glance(range(1, 401), [4 - step / 200 for step in range(1, 401)])
SAVES = range(50, 401, 50)
OTHERS = [Row("weight decay", "0.1, 0", "one per param group"), Row("clip", "1")]


@pytest.mark.parametrize("width", [32, 40, 60, 80, 200])
def test_the_picture_stays_whole_and_its_ticks_stand_below_it(width: int) -> None:
    style = Style(width)
    lines = table([*OTHERS, *sparkline(SEEN, SAVES, width - 16)], style)
    assert all(len(line) <= width for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("  loss "))
    picture, ticks = (line[16:] for line in lines[at : at + 2])
    assert len(picture) == min(WIDTH, width - 16) and " " not in picture
    assert len(ticks) == len(picture) and ticks.count(SAVED) in (7, 8)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_notes_of_other_rows_stay_where_they_are(width: int) -> None:
    alone = table(OTHERS, Style(width))
    assert table([*OTHERS, *sparkline(SEEN, SAVES, width - 16)], Style(width))[:2] == alone
