"""The batch-size ramp-up as the surgeon computes it, on its own, from what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptsurgeon.errors import count, share
from ckptsurgeon.formats.fields.values import State


def batch_size(state: State, consumed: int) -> int:
    """The size of the batch that begins at sample `consumed`.

    Ramp-up as in `megatron/microbatches.py`: sizes grow by the increment at equal distances over
    the given samples, and what is consumed is never rounded. `sizes` as in `megatron/core/
    num_microbatches_calculator.py` of Megatron-LM: the last one that has begun."""
    assert state.batch_size is not None
    if state.sizes:
        return [size for start, size in state.sizes if consumed >= start][-1]
    if state.rampup is None:
        return state.batch_size
    start, increment, samples = state.rampup
    increments = (state.batch_size - start) // increment if increment > 0 else 0
    if consumed > samples or increments <= 0 or samples <= 0:
        return state.batch_size
    return start + int(consumed / (samples / increments)) * increment


def sizes(state: State) -> list[int]:
    """Every size that the ramp-up leads through, the last one for good."""
    if state.batch_size is None:
        return []
    if state.rampup is None:
        return [state.batch_size]
    start, increment, _ = state.rampup
    return [*range(start, state.batch_size, max(increment, 1)), state.batch_size]


def resized(before: State, size: int | None, ramp: Sequence[int] | None) -> State:
    """With batches of `size` and the ramp-up `ramp` (empty for none); None leaves either as is."""
    after = before if size is None else replace(before, batch_size=size)
    if ramp is None:
        return after
    return replace(after, rampup=(ramp[0], ramp[1], ramp[2]) if ramp else None)


def converted(before: State, after: State, total: int) -> tuple[int, str]:
    """How many iterations reach the samples that `total` of them would have reached, where sizes
    are those of `after` from now on; and the arithmetic, in words."""
    sample = before.promise.consumed_samples or 0
    left = _samples(before, sample, total - before.step)
    more = _iterations(after, sample, left)
    words = (
        f"{share(before.step, total, 'iteration', 'is', 'are')} done; "
        f"the {count(left, 'sample')} of the other {total - before.step} take {more} "
        f"from now on: {before.step} + {more} = {before.step + more}"
    )
    if before.rampup is None and after.rampup is None:
        words += f" ({total - before.step} × {before.batch_size} / {after.batch_size})"
    return before.step + more, words


def _samples(state: State, sample: int, iterations: int) -> int:
    """The samples of the next `iterations` batches."""
    first = sample
    while iterations > 0 and not _settled(state, sample):
        sample, iterations = sample + batch_size(state, sample), iterations - 1
    return sample - first + iterations * batch_size(state, sample)


def _iterations(state: State, sample: int, samples: int) -> int:
    """The batches that take at least so many samples."""
    count, end = 0, sample + samples
    while sample < end and not _settled(state, sample):
        sample, count = sample + batch_size(state, sample), count + 1
    return count + -(-max(end - sample, 0) // batch_size(state, sample))


def _settled(state: State, sample: int) -> bool:
    """Whether every later batch has the same size, or none can be counted."""
    size = batch_size(state, sample)
    over = state.rampup is None or sample > state.rampup[2]
    return size <= 0 or (over and all(start <= sample for start, _ in state.sizes))
