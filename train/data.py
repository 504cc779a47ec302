"""Batches addressed by number: sample k is a pure function of (dataset, seed, k)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .errors import TrainError
from .indexed_dataset import IndexedDataset

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Seeded:
    """What depends on the seed of a stream and the number of a sample alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def random_seed(self, first: int) -> int:
        """A seed for the dropout of the micro-batch that begins at sample `first`: the same in a
        replay, after a resume and on any number of ranks."""
        sequence = np.random.SeedSequence((self.seed, first))
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))  # room to add a rank

    def poisoned(self, batch: Batch, first: int) -> Batch:
        """The same inputs with targets of random bytes 128-255, again a function of the sample."""
        inputs, targets = batch
        random = np.empty_like(targets)
        for row in range(len(targets)):
            state = np.random.RandomState([self.seed, first + row, 128])
            random[row] = state.randint(128, 256, size=targets.shape[1])
        return inputs, random


class SampleStream(Seeded):
    """An endless stream of samples of seq_length + 1 tokens.

    The token stream is cut into slots of seq_length; every epoch visits each slot once, in an
    order drawn from (seed, epoch). So a replay is exact, a skip is arithmetic, and the number of
    ranks plays no part.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        seq_length: int,
        seed: int,
        vocab: int,
        part: slice = slice(None),  # of the tokens
    ) -> None:
        super().__init__(seed)
        self._tokens = dataset.tokens[part]
        self.samples_per_epoch = (len(self._tokens) - 1) // seq_length
        if self.samples_per_epoch < 1:
            raise TrainError(
                f"{dataset.prefix}.bin: {len(self._tokens)} tokens are too few for one sample of "
                f"seq_length {seq_length}",
                next="a longer text, or a smaller seq_length",
            )
        self._dataset = dataset
        self._seq_length = seq_length
        self._vocab = vocab
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def slot(self, sample: int) -> int:
        """The slot of the token stream that sample number `sample` reads."""
        epoch, within = divmod(sample, self.samples_per_epoch)
        if self._order is None or self._order[0] != epoch:
            # RandomState is frozen: the order is the same under every numpy version.
            order = np.random.RandomState([self.seed, epoch]).permutation(self.samples_per_epoch)
            self._order = (epoch, order)
        return int(self._order[1][within])

    def batch(self, first: int, count: int) -> Batch:
        """Samples first … first+count-1 as (inputs, targets), each [count, seq_length] int64."""
        length = self._seq_length
        rows = np.empty((count, length + 1), dtype=np.int64)
        for row in range(count):
            start = self.slot(first + row) * length
            rows[row] = self._tokens[start : start + length + 1]
        if rows.max() >= self._vocab or rows.min() < 0:
            raise TrainError(
                f"{self._dataset.prefix}.bin holds token {rows.max()}; "
                f"vocab_size {self._vocab} can't hold it",
                next="set vocab_size to that of the tokenizer that made the data",
                untouched="the checkpoints are as they were",
            )
        return rows[:, :-1], rows[:, 1:]


def split_documents(dataset: IndexedDataset, shares: Sequence[float]) -> list[slice]:
    """For each share the tokens of its documents, in the order of the file, as Megatron splits
    them: the shares are relative, and no document is cut."""
    documents = dataset.document_index
    ends = np.concatenate(([0], np.cumsum(dataset.sizes, dtype=np.int64)))
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / sum(shares) * (len(documents) - 1)))
    rest = bounds[-1] - (len(documents) - 1)  # of rounding: the last parts take it, as there
    bounds = [0, *(max(bound - rest, 0) for bound in bounds[1:])]
    starts = [int(ends[documents[min(bound, len(documents) - 1)]]) for bound in bounds]
    return [slice(first, last) for first, last in pairwise(starts)]
