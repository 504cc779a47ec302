"""The counters of one step on each axis that tags use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckptsurgeon.logs.axis import GIGAFLOS, ITERATION, SAMPLES, TOKENS
from ckptsurgeon.plans.frozen import frozen


@frozen
class Marks:
    """What the checkpoint itself says about step N: its counters, and when its files were written
    (Unix time). Without a checkpoint only the iteration is known. `clocks` are tags of event files
    that count something else, by the series that is most frequent among them, each with its number
    at N."""

    iteration: int
    samples: int | None = None
    tokens: int | None = None
    gigaflos: float | None = None
    saved_at: float | None = None
    clocks: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def counters(self) -> dict[str, float]:
        """The known counters by axis."""
        named = {
            ITERATION: self.iteration, SAMPLES: self.samples,
            TOKENS: self.tokens, GIGAFLOS: self.gigaflos,
        }  # fmt: skip
        return {word: value for word, value in named.items() if value is not None}
