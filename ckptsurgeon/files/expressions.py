"""Regular expressions of a recipe, and the names that they match, in bounded time."""

from __future__ import annotations

import contextlib
import difflib
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import NoReturn

from ckptsurgeon.errors import UsageError, count

SECONDS = 10.0
"""CPU time for the names of a step: those of 10,000 layers take a hundredth of it."""


def check_pattern(key: str, pattern: str) -> None:
    """Raise for a text that is not a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"`{key}`: {error}", next="a regular expression") from None


def search(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """Those of `names` in which the expression is. Raises UsageError where that takes too long."""
    expression = re.compile(pattern)
    with bounded(pattern):
        return frozenset(name for name in names if expression.search(name))


def matching(
    pattern: str, known: Iterable[str], key: str = "", kind: str = "parameter"
) -> frozenset[str]:
    """Those of the names `known` in which the expression is, the value of `key`. Raises UsageError
    with the nearest ones where it is in none; `kind` is what they are called."""
    names = sorted(set(known))
    if found := search(pattern, names):
        return found
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+", " ", pattern).strip()
    near = difflib.get_close_matches(plain, names, n=3, cutoff=0.3) or names[:3]
    where = f"`{key}`: " if key else ""
    raise UsageError(
        f"{where}no {kind} matches {pattern!r}, of {count(len(names), 'name')}",
        next=f"the nearest are {', '.join(near)}",
    )


@contextlib.contextmanager
def bounded(pattern: str) -> Iterator[None]:
    """An expression like `(a+)+$` doubles its work with each letter of a name. `re` heeds signals
    while it works, in the main thread; in another thread nothing bounds it."""

    def stop(*_: object) -> NoReturn:
        raise UsageError(
            f"{pattern!r} takes more than {SECONDS:.0f} s on the names that are here",
            next="an expression in which nothing that repeats repeats again",
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
