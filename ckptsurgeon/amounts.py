"""How many of a thing there are, in words."""

from __future__ import annotations


def count(number: float, noun: str, plural: str = "", spec: str = "") -> str:
    """`1 file`, `2 files`; `spec` says how the number is written."""
    return f"{number:{spec}} {noun if number == 1 else plural or f'{noun}s'}"


def share(some: int, whole: int, noun: str, verb: str = "", verbs: str = "") -> str:
    """`1 of 3 files`, `1 of 1 file`; with a verb `1 of 3 files stays`, `2 of 3 files stay`."""
    return f"{some} of {count(whole, noun)} {verb if some == 1 else verbs}".rstrip()
