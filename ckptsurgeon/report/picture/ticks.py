"""Few ticks on an axis, and how the numbers at them are written."""

from __future__ import annotations

import math
from typing import Any


def few(axes: Any, most: int, which: str = "y") -> None:
    """About so many, at round numbers."""
    from matplotlib.ticker import MaxNLocator

    getattr(axes, f"{which}axis").set_major_locator(MaxNLocator(most))


def logarithmic(axes: Any, low: float, high: float) -> None:
    """Of a logarithmic axis: in a short span 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator

    parts = (1.0, 2.0, 5.0) if high < 200 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=parts, numticks=6))
    axes.yaxis.set_major_formatter(short)
    axes.minorticks_off()


def decades(axes: Any, base: int) -> None:
    """Powers of ten, or of two, on the axis of a strip."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(base, numticks=4))
    axes.yaxis.set_major_formatter(power if base == 2 else short)


def power(value: float, _: object = None) -> str:
    """A power of two: 2¹⁶."""
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return f"2{str(round(math.log2(value))).translate(digits)}" if value > 0 else "0"


def short(value: float, _: object = None) -> str:
    """1500, 20k, 3.5M, 1.5e-4."""
    if 0 < abs(value) < 0.001:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 10_000 or unit == "T":
            return f"{value:g}{unit}"
        value /= 1000
    return f"{value:g}"
