"""One optimizer of the table: the keys that its state dict has, and their values in a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

ZERO = "zero"
"""A tensor of zeros, or the number 0."""
CONSTANT = "constant"
"""What no update changes, or none reads: it stays as it is."""
ANEW = "anew"
"""What only the optimizer itself makes, from the weights, from the gradient or from a constant: the
whole state of the parameter goes, and the next update makes it."""
ABSENT_KEY = "absent"
"""A key that a new optimizer does not have."""
NOTHING = "none"
"""None."""

STARTS = (ZERO, CONSTANT, ANEW, ABSENT_KEY, NOTHING)
"""What a key may begin with, besides a number and another key."""
Start = str | float
"""One of these, a number, or `<KEY`: what the param group has under another key."""


@dataclass(frozen=True, eq=False)
class Entry:
    """An optimizer by its keys. `state` has what it keeps of each parameter, `group` its own
    settings in a param group, `counters` what it counts there: a key of state and counters → its
    value in a new optimizer. If the setting `unless` is not 0, the state does not begin with zeros.
    `beside` has what it saves beside states and groups: it stays (`constant`), or a new one does
    without it (`absent`). `refused` says why no reset can make a new optimizer of it."""

    name: str
    source: str
    state: Mapping[str, Start]
    group: frozenset[str]
    counters: Mapping[str, Start]
    unless: str = ""
    refused: str = ""
    beside: Mapping[str, Start] = field(default_factory=dict)


def entry(
    name: str,
    source: str,
    state: str = "",
    group: str = "",
    counters: str = "",
    *,
    unless: str = "",
    refused: str = "",
) -> Entry:
    """An `Entry` from words: `exp_avg mu_product=1 Q=anew`; a word alone begins at zero."""
    words = frozenset(group.split())
    return Entry(name, source, _starts(state), words, _starts(counters), unless, refused)


def _starts(words: str) -> Mapping[str, Start]:
    out: dict[str, Start] = {}
    for word in words.split():
        key, _, start = word.partition("=")
        out[key] = _start(start or ZERO)
    return MappingProxyType(out)


def _start(word: str) -> Start:
    if word in STARTS or word.startswith("<"):
        return word
    return float(word)
