"""Ranges of iterations that a run passes over, ends included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptsurgeon.files.pickles.tree import Object
from ckptsurgeon.formats.fields.understood import is_count

Range = tuple[int, int]


def merge(items: Iterable[Range]) -> list[Range]:
    """Inclusive ranges in ascending order; those that overlap or touch become one."""
    out: list[Range] = []
    for first, last in sorted(items):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out


def ahead(items: Iterable[Range], step: int) -> list[Range]:
    """What of them is after `step`."""
    return merge((max(first, step + 1), last) for first, last in items if last > step)


def of_numbers(numbers: object) -> list[Range]:
    """Each of a list of iterations; nothing of what is no such list."""
    found = numbers if isinstance(numbers, (list, tuple)) else ()
    return [(int(number), int(number)) for number in found if is_count(number)]


def of_pairs(pairs: object) -> list[Range]:
    """Of a list or deque of pairs of iterations; nothing of what is neither."""
    pairs = pairs.appends if isinstance(pairs, Object) else pairs
    found = pairs if isinstance(pairs, (list, tuple)) else ()
    whole = (pair for pair in found if isinstance(pair, (list, tuple)) and len(pair) == 2)
    return [(int(a), int(b)) for a, b in whole if is_count(a) and is_count(b)]


# --- of a trainer that counts only what it trains -------------------------------------------------


def uncounted(text: str, step: int) -> dict[int, int]:
    """What `100-200,150` of metaseq's flag says is ahead after `step` updates: the update before
    which it passes over data, and how many batches. Of two with one beginning it takes the last."""
    found: dict[int, int] = {}
    for word in text.split(","):
        first, _, last = word.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found[int(first)] = int(last or first) - int(first) + 1
    return {first: n for first, n in sorted(found.items()) if first > step and n > 0}


def with_uncounted(asked: Iterable[Range], saved: dict[int, int]) -> list[Range]:
    """The batches to pass over, numbered as if each were an update: those of the updates `asked`,
    by their numbers in a run that passes over `saved`, and of these."""
    passed, out = 0, []
    for first, number in saved.items():
        out.append((first + passed, first + passed + number - 1))
        passed += number

    def batch(update: int) -> int:
        return update + sum(number for first, number in saved.items() if first <= update)

    return merge([*out, *((batch(first), batch(last)) for first, last in asked)])


def by_updates(ranges: Sequence[Range]) -> str:
    """Batches to pass over as the flag has them: what it passes over moves no later number."""
    words, passed = [], 0
    for first, last in ranges:
        words.append(f"{first - passed}-{last - passed}")
        passed += last + 1 - first
    return ",".join(words)
