"""Batches are addressed by number: replay, skip, epochs, and any number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from train.data import SampleStream
from train.errors import TrainError
from train.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from train.microbatches import BatchSizes

SEQ = 4
TOKENS = 10 * SEQ + 3  # ten slots, and a rest that fills none


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    with IndexedDatasetWriter(tmp_path / "data", 256) as writer:
        writer.add_document(np.arange(TOKENS))
    return IndexedDataset(tmp_path / "data")


def stream(dataset: IndexedDataset, seed: int = 1) -> SampleStream:
    return SampleStream(dataset, SEQ, seed, vocab=256)


def test_targets_are_the_inputs_one_token_later(dataset: IndexedDataset) -> None:
    inputs, targets = stream(dataset).batch(0, 10)
    assert (targets == inputs + 1).all()


def test_an_epoch_visits_every_slot_once_and_the_next_one_in_another_order(
    dataset: IndexedDataset,
) -> None:
    one = stream(dataset)
    assert one.samples_per_epoch == 10
    first = [one.slot(k) for k in range(10)]
    second = [one.slot(k) for k in range(10, 20)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_replay_is_exact_from_any_point(dataset: IndexedDataset) -> None:
    one, other = stream(dataset), stream(dataset)
    everything = one.batch(0, 35)[0]
    assert (other.batch(17, 8)[0] == everything[17:25]).all()  # ahead, across an epoch
    assert (other.batch(3, 8)[0] == everything[3:11]).all()  # and back again


def test_the_seed_decides_the_order(dataset: IndexedDataset) -> None:
    slots = [[stream(dataset, seed).slot(k) for k in range(10)] for seed in (1, 1, 2)]
    assert slots[0] == slots[1] != slots[2]


def test_the_order_is_pinned(dataset: IndexedDataset) -> None:
    """A change here would give every saved run other data after a resume."""
    assert [stream(dataset).slot(k) for k in range(10)] == [2, 9, 8, 3, 6, 7, 1, 4, 0, 5]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 4), (2, 4), (2, 2), (4, 1)])
def test_any_number_of_ranks_sees_the_same_global_batch(
    dataset: IndexedDataset, ranks: int, micro: int
) -> None:
    sizes = BatchSizes(8, micro, ranks)
    firsts = [
        sizes.first_sample(16, micro_batch, rank)
        for micro_batch in range(sizes.micro_batches(8))
        for rank in range(ranks)
    ]
    rows = np.concatenate([stream(dataset).batch(first, micro)[0] for first in firsts])
    assert (rows == stream(dataset).batch(16, 8)[0]).all()


def test_the_seed_of_a_micro_batch_is_that_of_its_first_sample(dataset: IndexedDataset) -> None:
    seeds = [stream(dataset).random_seed(first) for first in range(100)]
    assert seeds == [stream(dataset).random_seed(first) for first in range(100)]
    assert len(set(seeds)) == 100 and stream(dataset, 2).random_seed(0) != seeds[0]
    assert max(seeds) < 2**63


def test_poison_changes_the_targets_only_and_replays(dataset: IndexedDataset) -> None:
    one = stream(dataset)
    clean = one.batch(8, 4)
    inputs, targets = one.poisoned(clean, 8)
    assert (inputs == clean[0]).all()
    assert targets.min() >= 128 and targets.max() <= 255
    assert (one.poisoned(one.batch(10, 2), 10)[1] == targets[2:]).all()


def test_a_token_beyond_the_vocabulary_is_refused(dataset: IndexedDataset) -> None:
    with pytest.raises(TrainError, match="vocab_size 16"):
        SampleStream(dataset, SEQ, 1, vocab=16).batch(0, 10)


def test_too_little_text_is_refused(dataset: IndexedDataset) -> None:
    with pytest.raises(TrainError, match="too few"):
        SampleStream(dataset, TOKENS, 1, vocab=256)
