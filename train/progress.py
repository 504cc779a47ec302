"""The counters of a run, and which iterations are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Progress:
    """How far the run is. Samples and tokens count data passed, trained or skipped; gigaflos
    counts arithmetic done, 6 per parameter (without embeddings) and token; updates counts the
    steps that changed weights, clipped_updates those of them whose gradients were clipped."""

    iteration: int = 0
    samples: int = 0
    tokens: int = 0
    gigaflos: float = 0.0
    valid_samples: int = 0
    updates: int = 0
    clipped_updates: int = 0

    def advance(self, samples: int, seq_length: int, flops_per_token: int) -> None:
        """One iteration over `samples` samples; flops_per_token is 0 when it was skipped."""
        tokens = samples * seq_length
        self.iteration += 1
        self.samples += samples
        self.tokens += tokens
        self.gigaflos += flops_per_token * tokens / 1e9

    def updated(self, grad_norm: float, clip_grad: float) -> None:
        """One step that changed weights, with gradients of this norm before clipping."""
        self.updates += 1
        self.clipped_updates += 0 < clip_grad < grad_norm

    def clipped_share(self) -> float:
        """Of all updates of the run, as far as it has counted them."""
        return self.clipped_updates / max(self.updates, 1)


def skip_range(ranges: Sequence[Sequence[int]], iteration: int) -> Sequence[int] | None:
    """The range [a, b], 1-based and inclusive, that holds `iteration`."""
    return next((r for r in ranges if r[0] <= iteration <= r[1]), None)
