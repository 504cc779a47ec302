"""Times functions of one thread in turns: what another load does to the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def seconds(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The CPU seconds of `rounds` calls of each, in turns; one call each goes before."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.process_time()
            function()
            times[name].append(time.process_time() - began)
    return times


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    """How many times as long, round by round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def summary(values: list[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(values), min(values), max(values)
