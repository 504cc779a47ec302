"""Batch-size ramp-up, and the counters that it and skips drive."""

from __future__ import annotations

import pytest

from train.errors import UsageError
from train.microbatches import BatchSizes
from train.progress import Progress, skip_range


def test_rampup_grows_in_equal_distances_of_samples() -> None:
    sizes = BatchSizes(16, 2, 2, rampup=[4, 4, 60])  # three increments, 20 samples apart
    assert [sizes.at(n) for n in (0, 19, 20, 39, 40, 59, 60, 61, 1000)] == [
        4, 4, 8, 8, 12, 12, 16, 16, 16,
    ]  # fmt: skip
    assert [sizes.micro_batches(size) for size in (4, 8, 16)] == [1, 2, 4]


def test_without_rampup_the_size_is_constant() -> None:
    assert {BatchSizes(8, 4, 2).at(n) for n in (0, 1, 10**9)} == {8}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((8, 3, 1, None), "8 is not a multiple"),
        ((8, 4, 4, None), "8 is not a multiple of micro_batch_size 4 x 4 ranks"),
        ((16, 4, 1, [2, 2, 60]), "2 is not a multiple"),
        ((16, 4, 1, [4, 5, 60]), "whole steps"),
        ((16, 4, 1, [4, 60]), "three numbers"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    arguments: tuple[int, int, int, list[int] | None], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        BatchSizes(*arguments)


def test_a_skipped_iteration_passes_data_but_no_arithmetic() -> None:
    progress = Progress()
    progress.advance(8, seq_length=32, flops_per_token=6_000_000)
    progress.advance(8, seq_length=32, flops_per_token=0)
    assert (progress.iteration, progress.samples, progress.tokens) == (2, 16, 512)
    assert progress.gigaflos == pytest.approx(256 * 6e6 / 1e9)


def test_skip_ranges_include_both_ends_in_any_order() -> None:
    ranges = [[10, 12], [3, 3]]
    hit = [i for i in range(1, 15) if skip_range(ranges, i)]
    assert hit == [3, 10, 11, 12]
