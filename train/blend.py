"""Several datasets as one stream, each by its weight; a sample is still arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .data import Batch, SampleStream, Seeded, split_documents
from .indexed_dataset import IndexedDataset

BLOCK = 1024
"""Samples among which the datasets have their shares; more where one's share is very small."""


class BlendedStream(Seeded):
    """Sample k comes from one of the streams, as a pure function of (streams, weights, seed, k).

    After every block of samples each stream has given its share of all so far, to one sample; the
    order within a block is drawn. Each stream goes on through its own samples in its own order.
    """

    def __init__(
        self, streams: Sequence[SampleStream], weights: Sequence[float], seed: int
    ) -> None:
        super().__init__(seed)
        self._streams = streams
        shares = np.array(weights, dtype=np.float64) / sum(weights)
        self._ends = np.concatenate(([0.0], np.cumsum(shares)))
        self._ends[-1] = 1.0
        self._block = max(BLOCK, math.ceil(2 / shares.min()))
        self._order: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    def place(self, sample: int) -> tuple[int, int]:
        """Which stream sample number `sample` comes from, and its number there."""
        block, within = divmod(sample, self._block)
        if self._order is None or self._order[0] != block:
            given = self._given(block)
            counts = self._given(block + 1) - given
            sources = np.repeat(np.arange(len(counts)), counts)
            order = np.random.RandomState([self.seed, block, 7]).permutation(sources)
            numbers = np.empty_like(order)
            for source, before in enumerate(given):
                mine = order == source
                numbers[mine] = before + np.arange(mine.sum())
            self._order = (block, order, numbers)
        return int(self._order[1][within]), int(self._order[2][within])

    def batch(self, first: int, count: int) -> Batch:
        """Samples first … first+count-1 as (inputs, targets), each [count, seq_length] int64."""
        places = (self.place(sample) for sample in range(first, first + count))
        parts = [self._streams[source].batch(number, 1) for source, number in places]
        inputs, targets = (np.concatenate(rows) for rows in zip(*parts, strict=True))
        return inputs, targets

    def _given(self, block: int) -> npt.NDArray[np.int64]:
        """How many samples of each stream lie before this block."""
        given: npt.NDArray[np.int64] = np.diff(
            np.floor(self._ends * (block * self._block) + 0.5).astype(np.int64)
        )
        return given


def parse(data: str) -> list[tuple[float, str]]:
    """`PREFIX`, or Megatron's `WEIGHT PREFIX WEIGHT PREFIX …`, as pairs. Raises ValueError for a
    weight that is not above 0."""
    words = data.split()
    try:
        first = float(words[0])
    except (ValueError, IndexError):
        return [(1.0, data)]
    if len(words) % 2:
        return [(1.0, data)]
    pairs = [(first, words[1])]
    pairs += [(float(w), p) for w, p in zip(words[2::2], words[3::2], strict=True)]
    if not all(weight > 0 and math.isfinite(weight) for weight, _ in pairs):
        raise ValueError(data)
    return pairs


def resolved(data: str) -> str:
    """The same with absolute prefixes."""
    pairs = parse(data)
    paths = [str(Path(prefix).expanduser().resolve()) for _, prefix in pairs]
    if len(pairs) == 1 and pairs[0][1] == data:
        return paths[0]
    return " ".join(f"{weight:g} {path}" for (weight, _), path in zip(pairs, paths, strict=True))


def open_streams(
    data: str, seq_length: int, seed: int, vocab: int, shares: Sequence[float], held_out: bool
) -> tuple[SampleStream | BlendedStream, SampleStream | BlendedStream]:
    """The samples to train on, and those that are held out: each dataset is split by itself."""
    pairs = parse(data)
    parts: list[list[SampleStream]] = [[], []]
    for _, prefix in pairs:
        dataset = IndexedDataset(prefix)
        split = split_documents(dataset, shares)
        for streams, part in zip(parts, (split[0], split[1 if held_out else 0]), strict=True):
            streams.append(SampleStream(dataset, seq_length, seed, vocab, part))
    if len(pairs) == 1:
        return parts[0][0], parts[1][0]
    weights = [weight for weight, _ in pairs]
    train, other = (BlendedStream(streams, weights, seed) for streams in parts)
    return train, other
