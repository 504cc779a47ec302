"""The counters of one step on each axis that tags use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckptsurgeon.logs.axis import GIGAFLOS, ITERATION, SAMPLES, TOKENS
from ckptsurgeon.plans.frozen import frozen


@frozen
class Marks:
    """What the checkpoint itself says about step N: its counters, and when its files were written
    (Unix time). Without a checkpoint only the iteration is known. `clocks` are the numbers at N
    of event files, each by the most frequent series there; where there are any, files of another
    one stay as they are."""

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
