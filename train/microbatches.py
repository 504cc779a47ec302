"""Batch-size ramp-up and the micro-batches of a global batch, with Megatron's semantics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UsageError


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size as a function of consumed samples.

    With ramp-up (start, increment, samples) the size grows by `increment` at equal distances over
    the first `samples` samples. Every size must be a multiple of micro_batch_size x ranks.
    """

    global_batch_size: int
    micro_batch_size: int
    ranks: int
    rampup: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.rampup is not None:
            if len(self.rampup) != 3:
                raise UsageError(
                    f"rampup_batch_size is {list(self.rampup)}; it has three numbers",
                    next="rampup_batch_size=[start, increment, samples]",
                )
            start, increment, samples = self.rampup
            span = self.global_batch_size - start
            if start < 1 or increment < 1 or samples < 0 or span < 0 or span % increment:
                raise UsageError(
                    f"rampup_batch_size {list(self.rampup)} does not lead in whole steps to "
                    f"global_batch_size {self.global_batch_size}",
                    next="choose start + n x increment = global_batch_size",
                )
        unit = self.micro_batch_size * self.ranks
        for size in self._sizes():
            if size % unit:
                raise UsageError(
                    f"global batch size {size} is not a multiple of micro_batch_size "
                    f"{self.micro_batch_size} x {self.ranks} ranks = {unit}",
                    next="change global_batch_size, rampup_batch_size or micro_batch_size",
                )

    def at(self, consumed_samples: int) -> int:
        """The size of the batch that starts at `consumed_samples`."""
        if self.rampup is None:
            return self.global_batch_size
        start, increment, samples = self.rampup
        steps = (self.global_batch_size - start) // increment
        if consumed_samples > samples or steps == 0:
            return self.global_batch_size
        done = int(consumed_samples / (samples / steps)) if samples else steps
        return start + min(done, steps) * increment

    def micro_batches(self, size: int) -> int:
        """How many micro-batches each rank runs for a global batch of `size`."""
        return size // (self.micro_batch_size * self.ranks)

    def first_sample(self, consumed_samples: int, micro_batch: int, rank: int) -> int:
        """The number of the first sample of one rank's micro-batch."""
        return consumed_samples + (micro_batch * self.ranks + rank) * self.micro_batch_size

    def _sizes(self) -> list[int]:
        if self.rampup is None:
            return [self.global_batch_size]
        start, increment, _ = self.rampup
        return list(range(start, self.global_batch_size + 1, increment))
