"""Batches that are read ahead are those that would have been read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from train.data import SampleStream
from train.errors import TrainError
from train.indexed_dataset import IndexedDataset
from train.loader import Loader, Part


def stream(corpus: Path, vocabulary: int = 256) -> SampleStream:
    return SampleStream(IndexedDataset(corpus), 32, seed=3, vocab=vocabulary)


@pytest.mark.parametrize("guess", ["right", "wrong", "none"])
def test_what_is_read_ahead_is_what_would_be_read(corpus: Path, guess: str) -> None:
    cpu = torch.device("cpu")
    plain, ahead = Loader(stream(corpus), cpu), Loader(stream(corpus), cpu, ahead=True)
    epoch = stream(corpus).samples_per_epoch
    firsts = [0, 4, epoch - 2, 8, epoch + 4]  # over the end of an epoch, and back
    parts = [Part(first, 4, 32 - n, poisoned=n == 2) for n, first in enumerate(firsts)]
    guesses = {"right": [*parts[1:], None], "wrong": parts, "none": [None] * len(parts)}[guess]
    for part, following in zip(parts, guesses, strict=True):
        for ours, theirs in zip(ahead.take(part, following), plain.take(part), strict=True):
            assert torch.equal(ours, theirs) and ours.shape == (4, part.length)


def test_an_error_of_a_read_ahead_comes_when_its_batch_is_taken(corpus: Path) -> None:
    tokens = IndexedDataset(corpus).tokens
    rows = torch.from_numpy(tokens[: len(tokens) // 32 * 32].astype(int)).view(-1, 32).amax(1)
    loader = Loader(stream(corpus, int(rows.max())), torch.device("cpu"), ahead=True)
    good = bad = None
    reference = stream(corpus)
    for number in range(reference.samples_per_epoch):
        largest = reference.batch(number, 1)[0].max()
        if largest == rows.max():
            bad = number
        elif reference.batch(number, 1)[1].max() < rows.max():
            good = number
        if good is not None and bad is not None:
            break
    assert good is not None and bad is not None
    loader.take(Part(good, 1, 32), Part(bad, 1, 32))
    with pytest.raises(TrainError, match="can't hold it"):
        loader.take(Part(bad, 1, 32))
