"""Micro-batches on the device: on a GPU the next one is read while this one is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from .blend import BlendedStream
from .data import SampleStream

MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """Which samples a micro-batch holds: `count` from number `first` on, cut to `length` tokens."""

    first: int
    count: int
    length: int
    poisoned: bool = False


class Loader:
    """Reads parts of one stream, `ahead` in a thread of its own: None where that is a GPU's.

    What is returned depends on the part alone; a guess of the next one that was wrong costs a read.
    All reads are the one thread's, since the stream keeps the order of its last epoch."""

    def __init__(
        self, stream: SampleStream | BlendedStream, device: torch.device, ahead: bool | None = None
    ) -> None:
        self._stream, self._device = stream, device
        self._pinned = device.type == "cuda"
        self._thread = (
            ThreadPoolExecutor(1, initializer=self._enter)
            if (self._pinned if ahead is None else ahead)
            else None
        )
        self._next: tuple[Part, Future[MicroBatch]] | None = None

    def take(self, part: Part, following: Part | None = None) -> MicroBatch:
        """Tokens and targets of `part` on the device; `following` is the best guess of the next."""
        if self._thread is None:
            tokens, targets = self._read(part)
        else:
            if self._next is None or self._next[0] != part:
                self._next = (part, self._thread.submit(self._read, part))
            tokens, targets = self._next[1].result()
            self._next = None
            if following is not None:
                self._next = (following, self._thread.submit(self._read, following))
        # Pinned memory is copied while the host goes on; it is not used again before that is done.
        return (
            tokens.to(self._device, non_blocking=self._pinned),
            targets.to(self._device, non_blocking=self._pinned),
        )

    def _read(self, part: Part) -> MicroBatch:
        batch = self._stream.batch(part.first, part.count)
        if part.poisoned:
            batch = self._stream.poisoned(batch, part.first)
        tokens, targets = (torch.from_numpy(rows[:, : part.length]) for rows in batch)
        return (tokens.pin_memory(), targets.pin_memory()) if self._pinned else (tokens, targets)

    def _enter(self) -> None:
        if self._pinned:  # a thread starts on the first GPU
            torch.cuda.set_device(self._device)
