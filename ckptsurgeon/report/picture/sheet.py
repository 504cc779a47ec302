"""The sheet: loss, saved steps, learning rate, gradient norm and loss scale on one x axis."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.logs.curves import Branch, Curve
from ckptsurgeon.logs.signals import GRAD_NORM, LOSS, LOSS_SCALE, LR
from ckptsurgeon.report.picture import marks, ticks
from ckptsurgeon.report.picture.arrows import Arrow, label, rows
from ckptsurgeon.report.picture.axes import Axis, axis
from ckptsurgeon.report.picture.footer import LETTER, words
from ckptsurgeon.report.picture.hidden import dashes
from ckptsurgeon.report.picture.limits import limits, lost
from ckptsurgeon.report.picture.theme import LIGHT, NORMAL, SMALL, Theme
from ckptsurgeon.report.picture.thin import smoothed, thinned

if TYPE_CHECKING:
    from ckptsurgeon.look.timeline import Timeline

FORMATS = ("svg", "png", "html")
WIDE, NARROW = (7.5, 5.75), (4.3, 6.4)
"""Inches: for a page or a slide, and for a phone. A letter of WIDE has 6 pixels or more where the
picture is 400 wide."""
DPI = 216
PIXELS = 1200
"""Columns that a curve is thinned to: those of the axes in a PNG."""
SMOOTH = 60
"""Of so many parts of all steps a median is taken."""
FALL = 0.02
"""The share of the x axis, at its beginning, that does not decide how high the loss's axis is."""
STRIPS = ((LR, "lr"), (GRAD_NORM, "grad\nnorm"), (LOSS_SCALE, "loss\nscale"))
LEFT, RIGHT = 0.9, 0.15
"""Inches beside the axes."""
MARK = 0.09
"""Inches in the axes beside the last step: the cross there is whole."""
GAP = 0.01
"""The share of the x axis from which on a pause is shown as one."""


def draw(
    timeline: Timeline,
    format: str,
    x: str = "steps",
    theme: Theme = LIGHT,
    size: tuple[float, float] = WIDE,
) -> bytes:
    """The picture as the bytes of an SVG or a PNG of these inches. Raises SurgeryError without
    matplotlib, or when there is no loss to draw."""
    if LOSS not in timeline.kept:
        raise SurgeryError(
            f"there is nothing to draw: {timeline.advice.reason}",
            untouched="nothing was written",
            next="--log FILE, --tb DIR or --tag loss=NAME    where the loss is",
        )
    try:
        import matplotlib
    except ImportError:
        raise SurgeryError(
            "a picture needs matplotlib, which is not installed",
            untouched="nothing was written",
            next="pip install 'ckptsurgeon[plot]'",
        ) from None
    style: Any = {
        "svg.hashsalt": theme.name, "svg.fonttype": "path", "font.size": NORMAL,
        "font.family": "sans-serif", "axes.edgecolor": theme.grid, "text.color": theme.ink,
        "axes.labelcolor": theme.muted, "xtick.color": theme.muted, "ytick.color": theme.muted,
        "axes.facecolor": theme.ground, "figure.facecolor": theme.ground, "path.simplify": False,
        "text.parse_math": False,  # a name or a reason is text: $ is no formula in it
    }  # fmt: skip
    out = io.BytesIO()
    with matplotlib.rc_context(style):
        figure = _Sheet(timeline, x, theme, size).figure()
        metadata = {"Date": None, "Creator": None} if format == "svg" else {"Software": None}
        figure.savefig(out, format=format, dpi=DPI, metadata=metadata)
    return out.getvalue()


@dataclass
class _Sheet:
    """The figure while it is drawn."""

    timeline: Timeline
    x: str
    theme: Theme
    size: tuple[float, float] = WIDE

    def figure(self) -> Any:
        """The whole of it."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        branches = [self.timeline.kept, *(left.curves for left in self.timeline.left)]
        self.axis: Axis = axis(self.x, branches)
        strips = [(signal, name) for signal, name in STRIPS if self._varies(signal)]
        self.low, self.high = self._limits(branches)
        self.dashes = dashes([branch[LOSS] for branch in branches])[1:]
        figure = Figure(figsize=self.size)
        FigureCanvasAgg(figure)
        row = [0.6] if self.timeline.saved else []
        heights = [5.0, *row, *([1.35] * len(strips))]
        width, _ = self.size
        top, bottom = words(figure, self.timeline, self.theme, self.size)
        grid = figure.add_gridspec(
            len(heights), 1, height_ratios=heights, hspace=0.17, left=LEFT / width,
            right=1 - RIGHT / width, top=top, bottom=bottom,
        )  # fmt: skip
        first = figure.add_subplot(grid[0])
        axes = [first, *(figure.add_subplot(grid[i], sharex=first) for i in range(1, len(heights)))]
        for item in axes:
            self._plain(item)
        self._bands(axes)
        self._loss(axes[0])
        if row:
            saved = partial(self._of, self.timeline.kept)
            marks.saved(axes[1], self.timeline, saved, self.theme)
        for item, (signal, name) in zip(axes[1 + len(row) :], strips, strict=True):
            self._strip(item, signal, name)
        self._onset(axes)
        room = MARK / (width - LEFT - RIGHT)
        first.set_xlim(self.low, self.high + room * (self.high - self.low))
        axes[-1].tick_params(axis="x", labelbottom=True, length=3)
        axes[-1].set_xlabel(self.axis.label)
        axes[-1].xaxis.set_major_formatter(ticks.short)
        figure.align_ylabels(axes)
        ticks.few(axes[-1], max(3, int(width)), "x")
        return figure

    # --- what all strips share -------------------------------------------------------------------

    def _plain(self, axes: Any) -> None:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.grid(True, color=self.theme.grid, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelsize=SMALL, labelbottom=False)

    def _limits(self, branches: Sequence[Branch]) -> tuple[float, float]:
        import numpy as np

        ends = []
        for branch in branches:
            steps = branch[LOSS].steps
            ends += self._of(branch, np.array([steps[0], steps[-1]])).tolist()
        if self.timeline.saved:  # Lightning logs the last update before the step by a number less
            ends += self._of(self.timeline.kept, np.array([max(self.timeline.saved)])).tolist()
        low, high = min(ends), max(ends)
        return low, high if high > low else low + 1.0

    def _of(self, branch: Branch, steps: Any) -> Any:
        return self.axis.of(branch, steps, self.timeline.kept)

    def _varies(self, signal: str) -> bool:
        """Whether a signal is worth a strip: it is logged, and not one value throughout."""
        import numpy as np

        branches = [self.timeline.kept, *(left.curves for left in self.timeline.left)]
        values = [branch[signal].values for branch in branches if signal in branch]
        return bool(values) and bool(np.ptp(np.nan_to_num(np.concatenate(values))) > 0)

    def _curve(self, axes: Any, branch: Branch, signal: str, kept: bool, dashed: Any = None) -> Any:
        """Raw behind, smoothed before it; returns the smoothed line's x and y. What another line
        would hide is `dashed`, and before that one."""
        curve = branch[signal]
        x, color = self._of(branch, curve.steps), self.theme.kept if kept else self.theme.left
        raw = thinned(x, curve.values, self.low, self.high, PIXELS)
        points = self._points(curve) if signal in (LOSS, GRAD_NORM) else 1
        order = 3.0 if kept else 2.0
        shown = raw
        if points > 1:
            axes.plot(
                *self._broken(*raw), color=color, linewidth=0.6, alpha=0.28 if kept else 0.16,
                zorder=order,
            )  # fmt: skip
            shown = smoothed(x, curve.values, points, PIXELS)
        width, alpha = (2.0, 1.0) if kept else (1.2, 0.55)
        if dashed is not None:
            width, alpha, order = 2.0, 1.0, 4.0
        if signal != LOSS:
            width *= 0.65
        axes.plot(
            *self._broken(*shown), color=color, linewidth=width, alpha=alpha, zorder=order + 2,
            solid_joinstyle="round", solid_capstyle="round", linestyle=dashed or "-",
            dash_capstyle="butt",
        )  # fmt: skip
        return shown

    def _points(self, curve: Curve) -> int:
        """How many points of a curve are one part of all steps."""
        import numpy as np

        branches = [self.timeline.kept, *(left.curves for left in self.timeline.left)]
        ends = [branch[LOSS].steps[[0, -1]] for branch in branches]
        span = max(b for _, b in ends) - min(a for a, _ in ends)
        each = float(np.median(np.diff(curve.steps))) if len(curve) > 1 else 1.0
        return round(float(span) / SMOOTH / max(1.0, each))

    def _broken(self, x: Any, y: Any) -> tuple[Any, Any]:
        """A gap where nothing was trained: over time, that of another branch."""
        import numpy as np

        gaps = np.diff(x)
        wide = (gaps > GAP * (self.high - self.low)) & (
            gaps > 20 * (np.median(gaps) if len(gaps) else 0.0)
        )
        where = np.flatnonzero(wide) + 1
        return np.insert(x, where, np.nan), np.insert(y, where, np.nan)

    def _bands(self, axes: Sequence[Any]) -> None:
        for spans, color in (
            (self.timeline.skips, self.theme.skip), (self.timeline.rewarms, self.theme.rewarm),
        ):  # fmt: skip
            for first, last in spans:
                a, b = self._of(self.timeline.kept, [first - 1, last])
                for item in axes:
                    item.axvspan(a, b, color=color, alpha=0.18, linewidth=0, zorder=1)

    # --- the strips ------------------------------------------------------------------------------

    def _loss(self, axes: Any) -> None:
        import numpy as np

        kept = self._curve(axes, self.timeline.kept, LOSS, True)
        ends = [
            (left, *self._curve(axes, left.curves, LOSS, False, dashed))
            for left, dashed in zip(self.timeline.left, self.dashes, strict=True)
        ]
        # The fall at the very beginning would press all that follows to the floor.
        curve = self.timeline.kept[LOSS]
        at, whole = self._of(self.timeline.kept, curve.steps), curve.values
        start = int(np.searchsorted(at, self.low + FALL * (self.high - self.low), "right"))
        begun = slice(start if len(at) - start > 1 else 0, None)  # no copy of a long curve
        shown = [(whole[begun], self._points(curve))]
        shown += [(x.curves[LOSS].values, self._points(x.curves[LOSS])) for x in self.timeline.left]
        found = limits(shown, PIXELS)
        low, high, log = (found.low, found.high, found.log) if found else (0.0, 1.0, False)
        arrows = [self._arrow(left, x, y, kept, high) for left, x, y in ends if left.to is not None]
        packed = self._packed(arrows)
        count = 1 + max((arrow.row for arrow in packed), default=-1)
        each = 0.36 / self.size[1]  # of the axes, that an arrow and its label take
        room = each * count + (0.03 if count else 0.04)
        if log:
            axes.set_yscale("log")
            ticks.logarithmic(axes, low, high)
            low, high = math.log(low), math.log(high)
        else:
            ticks.few(axes, 6)
        top = low + (high - low + 1e-9) / (1 - room)
        bottom = low - 0.03 * (top - low)
        axes.set_ylim(*((math.exp(bottom), math.exp(top)) if log else (bottom, top)))
        axes.set_ylabel("loss")
        if found is None:
            axes.set_yticks([])
        else:
            span = self.low, self.high
            marks.beyond(axes, at[begun], whole[begun], found, self.theme, span, self._late)
        marks.no_numbers(axes, lost(at, whole, self.high - self.low), whole, self.theme)
        for left, x, y in ends:
            good = np.flatnonzero(np.isfinite(y))
            if len(good):
                at_end = float(x[good[-1]]), float(y[good[-1]])
                last = float(left.curves[LOSS].values[-1])
                marks.left_off(axes, *at_end, last, self.theme, self._late)
        for arrow in packed:
            self._draw(axes, arrow, 1 - room + 0.5 * each + each * arrow.row)

    def _arrow(self, left: Any, x: Any, y: Any, kept: Any, high: float) -> Arrow:
        import numpy as np

        good = np.flatnonzero(np.isfinite(y))
        end = good[-1] if len(good) else len(x) - 1
        to_x = float(self._of(self.timeline.kept, [left.to])[0])
        to_y = float(np.interp(to_x, *kept))
        text = label(left.receipt, left.title, left.why, int(1 / self._letter))
        start = float(y[end]) if len(good) else high
        return Arrow(float(x[end]), start, to_x, to_y if math.isfinite(to_y) else high, text, 0)

    def _packed(self, arrows: Sequence[Arrow]) -> list[Arrow]:
        spans = []
        for arrow in arrows:
            low, high = sorted((arrow.x, arrow.to_x))
            low, high = (
                min(low, self._start(arrow)),
                max(high, self._start(arrow) + self._wide(arrow)),
            )
            spans.append((low, high))
        found = rows(spans, 0.01 * (self.high - self.low))
        return [
            Arrow(item.x, item.y, item.to_x, item.to_y, item.text, row)
            for item, row in zip(arrows, found, strict=True)
        ]

    @property
    def _letter(self) -> float:
        """The share of the axes that a letter takes."""
        return LETTER * SMALL / (72 * (self.size[0] - LEFT - RIGHT))

    def _wide(self, arrow: Arrow) -> float:
        return self._letter * len(arrow.text) * (self.high - self.low)

    def _start(self, arrow: Arrow) -> float:
        """Where the label begins: at the left end of the arrow, unless it would leave the axes."""
        left = min(arrow.x, arrow.to_x) + 0.006 * (self.high - self.low)
        return max(self.low, min(left, self.high - self._wide(arrow)))

    def _late(self, x: float, words: str) -> bool:
        """Whether words that begin at x would leave the axes at the right."""
        return x + (self._letter * len(words) + 0.03) * (self.high - self.low) > self.high

    def _draw(self, axes: Any, arrow: Arrow, height: float) -> None:
        """Up from the cross, back, and down to the kept line."""
        from matplotlib.transforms import blended_transform_factory

        mixed = blended_transform_factory(axes.transData, axes.transAxes)
        y, to_y = (
            axes.transAxes.inverted().transform(axes.transData.transform((0, value)))[1]
            for value in (arrow.y, arrow.to_y)
        )
        color = self.theme.muted
        side = 0.0035 * arrow.row * (self.high - self.low)  # or the lines of equal ends were one
        up, down = arrow.x + side, arrow.to_x - side
        look = {"color": color, "linewidth": 0.9, "transform": mixed, "zorder": 6, "clip_on": False}
        axes.plot([arrow.x, up, up, down], [y, y, height, height], alpha=0.9,
                  solid_joinstyle="round", **look)  # fmt: skip
        axes.annotate(
            "", xy=(down, to_y), xytext=(down, height), xycoords=mixed,
            textcoords=mixed, zorder=9,
            arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 0.9, "alpha": 0.9,
                        "shrinkA": 0, "shrinkB": 3, "mutation_scale": 10},
        )  # fmt: skip
        axes.text(
            self._start(arrow), height + 0.008, arrow.text,
            fontsize=SMALL, color=self.theme.ink, va="bottom", ha="left", zorder=8, transform=mixed,
            bbox=marks.ground(self.theme),
        )  # fmt: skip

    def _strip(self, axes: Any, signal: str, name: str) -> None:
        import numpy as np

        for left, dashed in zip(self.timeline.left, self.dashes, strict=True):
            if signal in left.curves:
                self._curve(axes, left.curves, signal, False, dashed)
        if signal in self.timeline.kept:
            self._curve(axes, self.timeline.kept, signal, True)
        branches = [self.timeline.kept, *(left.curves for left in self.timeline.left)]
        values = np.concatenate([b[signal].values for b in branches if signal in b])
        values = values[np.isfinite(values) & (values > 0)]
        if signal == LOSS_SCALE and len(values):
            axes.set_yscale("log", base=2)
        elif len(values) and values.max() > 8 * np.quantile(values, 0.02):
            axes.set_yscale("log", nonpositive="mask")  # a rate of 0 is no line to the ground
        else:
            ticks.few(axes, 3)
            axes.yaxis.set_major_formatter(ticks.short)
        if axes.get_yscale() == "log":
            ticks.decades(axes, 2 if signal == LOSS_SCALE else 10)
        axes.minorticks_off()
        axes.set_ylabel(name)
        if signal == LR:
            for step, receipt in self.timeline.edits:
                (x,) = self._of(self.timeline.kept, [step])
                axes.axvline(x, color=self.theme.muted, linewidth=0.9, linestyle=(0, (2, 2)))
                axes.annotate(receipt, (x, 1), xycoords=("data", "axes fraction"), fontsize=SMALL,
                              xytext=(3, -10), textcoords="offset points",
                              color=self.theme.muted)  # fmt: skip

    def _onset(self, axes: Sequence[Any]) -> None:
        spike = self.timeline.advice.spike
        if spike is None or self.timeline.advice.verdict not in ("diverged", "too early"):
            return
        (x,) = self._of(self.timeline.kept, [spike.first])
        for item in axes:
            item.axvline(x, color=self.theme.sign, linewidth=1.1, linestyle=(0, (4, 2)), zorder=6)
        text = f"onset {spike.first}: {spike.signs[0].signal.replace('-', ' ')}"
        late = self._late(x, text)
        axes[0].annotate(
            text, (x, 0.35), xycoords=("data", "axes fraction"),
            xytext=(-5 if late else 5, 0), textcoords="offset points", fontsize=SMALL,
            color=self.theme.sign, ha="right" if late else "left", va="center", zorder=8,
            bbox=marks.ground(self.theme),
        )  # fmt: skip
