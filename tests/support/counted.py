"""What a command costs, counted and not timed: the same on every machine and at every load."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from click import Command
from click.testing import CliRunner, Result
from typer.main import get_command

from ckptsurgeon.cli import app


@dataclass
class Cost:
    """Calls of a command in this process: of functions, Python's and C's, and of those that go to
    the kernel (module `posix`, and `open`)."""

    calls: int = 0
    system: int = 0


@functools.cache
def _command() -> Command:
    """The command line, which is made once, whatever it is asked."""
    return get_command(app)


def counted(*words: object) -> tuple[Cost, Result]:
    """Carry out a command and count."""
    cost = Cost()

    def called(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            cost.calls += 1
        elif event == "c_call":
            cost.calls += 1
            cost.system += function.__module__ == "posix" or function.__name__ == "open"

    runner = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "100"})
    command = _command()
    before = sys.getprofile()
    sys.setprofile(called)
    try:
        result = runner.invoke(command, [str(word) for word in words])
    finally:
        sys.setprofile(before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return cost, result


def linear(costs: dict[int, Cost], slack: int = 2) -> None:
    """Of three sizes: each unit from the second to the third costs at most 1.5 times as much as
    each from the first to the second, and `slack` system calls."""
    (a, small), (b, middle), (c, large) = sorted(costs.items())
    for kind, least in (("system", slack), ("calls", 20 * slack)):
        first = (getattr(middle, kind) - getattr(small, kind)) / (b - a)
        then = (getattr(large, kind) - getattr(middle, kind)) / (c - b)
        assert then <= 1.5 * first + least, f"{kind}: {first:.1f} a unit, then {then:.1f}"


def calls(work: Callable[[], object]) -> int:
    """Of Python's functions and C's, that `work` makes."""
    count = 0

    def called(frame: Any, event: str, function: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
