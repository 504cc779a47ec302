"""The counters of a run, and which iterations are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Progress:
    """How far the run is. Samples and tokens count data passed, trained or skipped; gigaflos
    counts arithmetic done, 6 per parameter (without embeddings) and token."""

    iteration: int = 0
    samples: int = 0
    tokens: int = 0
    gigaflos: float = 0.0
    valid_samples: int = 0

    def advance(self, samples: int, seq_length: int, flops_per_token: int) -> None:
        """One iteration over `samples` samples; flops_per_token is 0 when it was skipped."""
        tokens = samples * seq_length
        self.iteration += 1
        self.samples += samples
        self.tokens += tokens
        self.gigaflos += flops_per_token * tokens / 1e9


def skip_range(ranges: Sequence[Sequence[int]], iteration: int) -> Sequence[int] | None:
    """The range [a, b], 1-based and inclusive, that holds `iteration`."""
    return next((r for r in ranges if r[0] <= iteration <= r[1]), None)
