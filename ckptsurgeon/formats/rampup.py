"""The batch-size ramp-up as the surgeon computes it, on its own, from what a checkpoint keeps."""

from __future__ import annotations

from ckptsurgeon.formats.values import State


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
