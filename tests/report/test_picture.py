"""The picture: nothing is thinned away, every format opens, and it says what it has no data for."""

from __future__ import annotations

import math
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.text import Text

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.logs.curves import Curve, Curves, of_rows
from ckptsurgeon.logs.signals import LOSS
from ckptsurgeon.look.logged import own
from ckptsurgeon.look.timeline import Left, Timeline, timeline_of
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.advice import short
from ckptsurgeon.report.picture import draw, page
from ckptsurgeon.report.picture.arrows import MOST, label, rows
from ckptsurgeon.report.picture.axes import axis
from ckptsurgeon.report.picture.footer import footer, headline
from ckptsurgeon.report.picture.hidden import dashes
from ckptsurgeon.report.picture.legend import MARKS
from ckptsurgeon.report.picture.limits import limits, lost
from ckptsurgeon.report.picture.sheet import DPI, NARROW, WIDE, _Sheet
from ckptsurgeon.report.picture.theme import DARK, LIGHT
from ckptsurgeon.report.picture.thin import smoothed, thinned
from tests.conftest import Trained
from tests.look.invented_curves import HELD_OUT, invented

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def timeline(trained: Trained) -> Timeline:
    """Rolled back from 8 to 4, with a reason."""
    root = trained()
    run = Run.open(root)
    recipe = {"rollback": {"to": 4}, "why": "a spike & more <at> 7", "skip": ["7-8"]}
    surgery.apply(run, plan(run, from_data(recipe)))
    return timeline_of(own(run, {}), run)


# --- thinning ------------------------------------------------------------------------------------


def test_no_spike_is_thinned_away() -> None:
    dice = np.random.default_rng(0)
    x, y = np.arange(100_000.0), dice.normal(2.0, 0.1, 100_000)
    where = dice.choice(100_000, 40, replace=False)
    y[where[:20]], y[where[20:]] = 9.0, -9.0
    few_x, few_y = thinned(x, y, 0.0, 100_000.0, 1000)
    assert len(few_x) == 2000 and (np.diff(few_x) >= 0).all()
    columns = few_y.reshape(-1, 2)
    whole = y.reshape(1000, 100)
    assert (columns.min(axis=1) == whole.min(axis=1)).all()
    assert (columns.max(axis=1) == whole.max(axis=1)).all()


def test_a_short_curve_stays_as_it_is() -> None:
    x, y = np.arange(5.0), np.arange(5.0)
    assert thinned(x, y, 0.0, 4.0, 1000)[1] is y


def test_a_stretch_that_is_no_number_leaves_a_gap() -> None:
    x, y = np.arange(10_000.0), np.ones(10_000)
    y[4000:5000] = math.nan
    few_x, few_y = thinned(x, y, 0.0, 10_000.0, 100)
    gap = few_x[np.isnan(few_y)]
    assert gap.min() >= 4000 and gap.max() < 5000


def test_smoothing_does_not_move_an_edge() -> None:
    x, y = np.arange(600.0), np.where(np.arange(600) < 300, 2.0, 50.0)
    line_x, line_y = smoothed(x, y, 11, 1000)
    assert (line_y[line_x < 297] == 2.0).all() and (line_y[line_x > 303] == 50.0).all()


# --- arrows --------------------------------------------------------------------------------------


def test_arrows_of_one_row_do_not_overlap() -> None:
    spans = [(0.0, 9.0), (1.0, 3.0), (5.0, 8.0), (2.0, 6.0)]
    found = rows(spans, 0.1)
    assert found[1] == found[2] == 0
    for i, (a, b) in enumerate(spans):
        for k, (c, d) in enumerate(spans[:i]):
            assert found[i] != found[k] or b < c or d < a


def test_many_rollbacks_share_the_last_row() -> None:
    assert max(rows([(0.0, 10.0)] * 40, 0.1)) == MOST - 1


def test_an_arrow_names_receipt_and_reason() -> None:
    assert label("0003", "rollback 8 → 4", "a spike") == "0003  a spike"
    assert label("0003", "rollback 8 → 4", "") == "0003  rollback 8 → 4"
    assert len(label("0003", "", "x" * 500)) == 120


# --- how high, and where no number is ------------------------------------------------------------


@example(seed=70006, far=[(0.75, 1e3)])  # the last number of a run that ends in NaN
@settings(max_examples=100, deadline=None)
@given(
    seed=st.sampled_from(HELD_OUT),
    far=st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(1e3, 1e30)), max_size=2),
)
def test_single_points_move_no_axis_and_no_curve_leaves_it(
    seed: int, far: list[tuple[float, float]]
) -> None:
    clean = invented(seed).branch["loss"].values
    values = clean.copy()
    for share, height in far:
        values[int(share * len(values))] = height
    alone, shown = (limits([(curve, len(curve) // 60)], 1200) for curve in (clean, values))
    if alone is None or shown is None:
        assert not np.isfinite(clean).any()
        return
    assert shown.log == alone.log
    high, low, most, least = (
        math.log(value) if shown.log else value
        for value in (shown.high, shown.low, alone.high, alone.low)
    )
    assert high - low <= 6 * (most - least)  # of the axis, the curve has a sixth and mostly more
    last = np.median(clean[np.isfinite(clean)][-5:])
    assert shown.low - 1e-6 <= last <= shown.high + 1e-6


@settings(max_examples=40, deadline=None)
@given(gone=st.lists(st.booleans(), min_size=2, max_size=200))
def test_every_point_that_is_no_number_is_in_a_band(gone: list[bool]) -> None:
    x = np.arange(1.0, len(gone) + 1)
    bands = lost(x, np.where(gone, math.nan, 2.0), len(gone) - 1)
    assert all(any(a <= at <= b for a, b in bands) == bad or not bad
               for at, bad in zip(x, gone, strict=True))  # fmt: skip
    assert bool(bands) == any(gone) and all(a < b for a, b in bands)
    assert all(a[1] < b[0] for a, b in pairwise(bands))


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_words_stay_inside_and_off_each_other(size: tuple[float, float]) -> None:
    """Legend, verdict, foot and axes; also of a run with everything in it."""
    dice = np.random.default_rng(0)
    points: list[tuple[int, dict[str, float], float]] = [
        (step, {"loss": 2.0 + 0.05 * dice.normal(), "lr": 1e-4 * step, "grad-norm": norm}, math.nan)
        for step, norm in enumerate(dice.lognormal(0, 1, 2000), 1)
    ]
    points += points[1000:1900] + [
        (step, {"loss": math.nan}, math.nan) for step in range(1901, 2100)
    ]
    points[300][1]["loss"] = 1e4
    told = timeline_of(of_rows(points, Path("log")), None)
    left = tuple(replace(item, to=1000, receipt="0001", why="w" * 200) for item in told.left)
    saved = dict(zip(range(200, 1200, 200), MARKS, strict=True))
    sheet = _Sheet(replace(told, left=left, saved=saved, skips=((5, 90),)), "steps", LIGHT, size)
    figure = sheet.figure()
    figure.canvas.draw()
    whole, draw = figure.bbox, figure.canvas.get_renderer()
    boxes = [text.get_window_extent(draw) for text in figure.texts]
    boxes += [item.get_window_extent(draw) for item in figure.legends]
    axes = [item.get_window_extent(draw) for item in figure.axes]
    for i, box in enumerate(boxes):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1
        assert whole.y0 <= box.y0 and box.y1 <= whole.y1
        assert not any(box.overlaps(other) for other in [*boxes[:i], *axes])
    labels = [text for item in figure.axes for text in (item.yaxis.label, *item.get_yticklabels())]
    assert all(text.get_window_extent(draw).x0 >= whole.x0 for text in labels if text.get_text())
    smallest = min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text())
    assert smallest * 400 / (72 * size[0]) > 6.5  # pixels, where the picture is 400 wide
    words = [text.get_text() for text in figure.findobj(Text)]
    assert "NaN" in words and "10k" in words


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_the_cross_of_a_branch_that_ends_last_is_whole(
    timeline: Timeline, size: tuple[float, float]
) -> None:
    left = (Left(timeline.kept, 4, "0001"),)
    told = replace(timeline, left=left, saved={}, skips=())
    figure = _Sheet(told, "steps", LIGHT, size).figure()
    figure.canvas.draw()
    axes = figure.axes[0]
    assert "abandoned" in [text.get_text() for each in figure.legends for text in each.get_texts()]
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    middle = axes.transData.transform(cross.get_xydata())[0][0]
    half = (cross.get_markersize() / 2 + cross.get_markeredgewidth() / 2) * figure.dpi / 72
    assert middle + half <= axes.get_window_extent().x1


@pytest.mark.parametrize("last", [math.nan, math.inf, 2.0])
def test_a_branch_that_was_left_says_what_it_ended_in(last: float) -> None:
    points = [(step, {"loss": 2.0}, math.nan) for step in range(1, 150)]
    points += [(step, {"loss": last}, math.nan) for step in range(150, 201)]
    points += [(step, {"loss": 1.9}, math.nan) for step in range(101, 301)]
    told = timeline_of(of_rows(points, Path("log")), None)
    left = tuple(replace(item, to=100, receipt="0001") for item in told.left)
    figure = _Sheet(replace(told, left=left), "steps", LIGHT, WIDE).figure()
    words = {text.get_text() for text in figure.findobj(Text)}
    says = {"then NaN", "then Inf"} & words
    assert says == {math.isnan(last): {"then NaN"}, math.isinf(last): {"then Inf"}}.get(True, set())


# --- formats -------------------------------------------------------------------------------------


def test_an_svg_is_one_and_the_same_each_time(timeline: Timeline) -> None:
    drawn = draw(timeline, "svg")
    assert ElementTree.fromstring(drawn).tag == f"{SVG}svg"
    assert drawn == draw(timeline, "svg") and drawn != draw(timeline, "svg", theme=DARK)


def test_a_png_has_the_size_of_the_sheet(timeline: Timeline) -> None:
    drawn = draw(timeline, "png")
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", drawn[16:24]) == tuple(round(DPI * inches) for inches in WIDE)


def test_a_page_needs_nothing_but_itself(timeline: Timeline) -> None:
    made = page(timeline).decode()
    assert made.count("<svg") == 4 and "<script" not in made
    loaded = re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", made)
    assert loaded == [] and "@import" not in made and "url(http" not in made
    assert "a spike &amp; more &lt;at&gt; 7" in made
    names = re.findall(r'\bid="([^"]+)"', made)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', made)) <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(timeline: Timeline, tmp_path: Path, scheme: str) -> None:
    """Headless Chromium, where one is installed; the ground has the colour of the scheme."""
    names = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    (tmp_path / "run.html").write_bytes(page(timeline))
    shot = tmp_path / "shot.png"
    preferred = {"light": 1, "dark": 0}[scheme]
    subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
            f"--blink-settings=preferredColorScheme={preferred}", f"--screenshot={shot}",
            (tmp_path / "run.html").as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    from matplotlib.image import imread

    pixels = imread(str(shot))[..., :3]
    ground = {"light": (1.0, 1.0, 1.0), "dark": (13 / 255, 17 / 255, 23 / 255)}[scheme]
    assert np.abs(pixels[2, 2] - ground).max() < 0.01
    kept = {"light": (10, 95, 180), "dark": (88, 166, 255)}[scheme]
    close = np.abs(pixels - np.array(kept) / 255).max(axis=2) < 0.02
    assert close.sum() > 200  # the kept line


@pytest.mark.parametrize("x", ["steps", "tokens", "samples", "time"])
@pytest.mark.long
def test_every_axis_is_drawn(timeline: Timeline, x: str) -> None:
    assert draw(timeline, "svg", x).startswith(b"<?xml")


def test_the_foot_counts_what_was_discarded(timeline: Timeline) -> None:
    """32 tokens a sample, 8 samples a step: 4 steps were kept and 4 discarded."""
    assert footer(timeline) == (
        "kept 1.024k tokens   ·   discarded 1.024k tokens, "
        "50\N{NO-BREAK SPACE}% of what was trained"
    )


@given(
    skips=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)).map(sorted), max_size=4),
    every=st.integers(1, 9),
)
@settings(deadline=None)
def test_the_foot_counts_what_was_trained_and_no_data_that_was_skipped(
    skips: list[list[int]], every: int
) -> None:
    """A law: the kept line has 8 samples for each step that was trained, whatever was skipped and
    however often it was logged; the counter of the log goes on over what is skipped."""
    spans = tuple((first, last) for first, last in skips)
    skipped = {step for first, last in spans for step in range(first, last + 1)}
    steps = [step for step in range(1, 81) if step not in skipped]
    rows = [
        (step, {"loss": 1.0, "samples": 8.0 * step}, math.nan)
        for step in steps
        if step % every == 0 or step == steps[-1] or {step - 1, step + 1} & skipped
    ]
    told = timeline_of(of_rows(rows, Path("log")), None)
    first = rows[0][0] - 1  # what a log that begins later does not know is taken as trained
    unseen = len(skipped & set(range(1, first + 1)))
    assert footer(replace(told, skips=spans)) == f"kept {short(8 * (len(steps) + unseen))} samples"


def test_an_axis_that_the_logs_do_not_know_is_refused() -> None:
    rows = [(step, {"loss": 1.0}, math.nan) for step in range(1, 5)]
    kept = of_rows(rows, Path("log")).kept
    for kind in ("tokens", "samples", "time", "epochs"):
        with pytest.raises(UsageError):
            axis(kind, [kept])


def test_one_point_and_a_run_of_nan_are_drawn() -> None:
    for values in ([1.0], [math.nan] * 5, [1.0, math.inf, 2.0], [0.0, 0.0]):
        steps = np.arange(1, len(values) + 1)
        curve = Curve(steps, np.array(values), np.full(len(values), math.nan))
        told = timeline_of(Curves({"loss": curve}, sources=(Path("log"),)), None)
        assert draw(told, "png")[:4] == b"\x89PNG"


@pytest.mark.parametrize("text", ["x $x^{2$ y", r"$\frac$", "$$", "a_{b", r"\$5 and $6"])
def test_a_name_and_a_reason_are_no_formula(text: str) -> None:
    points = [(step, {"loss": 1.0}, math.nan) for step in (1, 2, 3, 4, 3, 4, 5)]
    told = timeline_of(of_rows(points, Path("log")), None)
    left = tuple(replace(item, to=2, receipt="0001", why=text) for item in told.left)
    assert left
    assert draw(replace(told, name=text, left=left), "png")[:4] == b"\x89PNG"


def test_without_a_loss_there_is_no_picture(timeline: Timeline) -> None:
    with pytest.raises(SurgeryError, match="nothing to draw"):
        draw(replace(timeline, kept={}), "svg")


def test_a_step_that_is_saved_beyond_the_log_is_inside_the_picture(timeline: Timeline) -> None:
    """Lightning logs the update that made step 60 as 59."""
    later = replace(timeline, saved={4: "sound", 9: "sound", 12: "in the attic"})
    assert headline(later).startswith("at step 9 ")
    sheet = _Sheet(later, "steps", LIGHT)
    axes = sheet.figure().axes[0]
    assert axes.get_xlim()[1] >= 12


# --- branches that are alike ---------------------------------------------------------------------


def test_branches_that_are_alike_are_all_seen(timeline: Timeline) -> None:
    """Of lines that are one each has dashes of its own, before the line that would hide it."""
    kept = timeline.kept
    loss = kept[LOSS]
    other = {LOSS: Curve(loss.steps, loss.values * 1.2, loss.walls)}
    again = {LOSS: Curve(loss.steps, loss.values * 1.2, loss.walls)}
    left = tuple(Left(branch, 4, "0001") for branch in (kept, other, kept, again))
    sheet = _Sheet(replace(timeline, left=left), "steps", LIGHT)
    axes = sheet.figure().axes[0]
    lines: dict[bool, list[Any]] = {True: [], False: []}
    for line in axes.lines:
        if line.get_color() in (LIGHT.left, LIGHT.kept) and len(line.get_xdata()) > 2:
            lines[line.get_color() == LIGHT.left].append(line)
    ends = [line for line in lines[True] if line.get_linestyle() == "--"]
    assert [sheet.dashes[k] is None for k in range(4)] == [False, True, False, False]
    assert len(ends) == 3
    assert min(line.get_zorder() for line in ends) > max(x.get_zorder() for x in lines[False])
    offsets = [dash[0] for dash in sheet.dashes if dash]
    assert len({*offsets}) == 3


def test_a_branch_that_left_the_other_is_not_dashed(timeline: Timeline) -> None:
    loss = timeline.kept[LOSS]
    near = Curve(loss.steps, loss.values * 1.01, loss.walls)
    assert dashes([loss, near]) == [None, None]
    assert dashes([loss, loss]) == [None, (0, (3, 3))]
