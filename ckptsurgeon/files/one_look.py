"""One look at a run: what lies in its folders is listed once, however many of its steps are asked
for.

A command asks about each step in turn, and the answer to each is in the same listing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from ckptsurgeon import disk

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R")

_answers: ContextVar[dict[Any, tuple[int, Any]] | None] = ContextVar("_answers", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Within it, what a `once` function found is found no second time, until this process changes
    something on disk. What others change meanwhile is not seen: an edit compares the files that it
    relies on by itself (`transaction.assumptions`)."""
    if _answers.get() is not None:  # a part of a longer look
        yield
        return
    token = _answers.set({})
    try:
        yield
    finally:
        _answers.reset(token)


def shared(function: Callable[[T], R]) -> Callable[[T], R]:
    """The function for other threads, which a look is not known to: it is part of this one there.
    What two of them ask at once may be found twice."""
    answers = _answers.get()

    def asked(item: T) -> R:
        token = _answers.set(answers)
        try:
            return function(item)
        finally:
            _answers.reset(token)

    return asked


def look_again() -> None:
    """Forget what was found: others had time to change it, while a question waited."""
    if (answers := _answers.get()) is not None:
        answers.clear()


def once(function: F) -> F:
    """A function of hashable arguments whose answer depends on the disk and on them alone. Callers
    must not change what it returns."""

    @functools.wraps(function)
    def asked(*arguments: Any) -> Any:
        answers = _answers.get()
        if answers is None:
            return function(*arguments)
        key = (asked, *arguments)
        changes, answer = answers.get(key, (-1, None))
        if changes != disk.calls.made:
            changes = disk.calls.made
            answer = function(*arguments)
            answers[key] = changes, answer
        return answer

    return cast(F, asked)
