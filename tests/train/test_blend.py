"""A blend of datasets: each has its share of any stretch, and a replay is exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.trained_run import step_back
from train.blend import BlendedStream, open_streams, parse, resolved
from train.config import load_config
from train.data import SampleStream
from train.errors import UsageError
from train.indexed_dataset import IndexedDataset, IndexedDatasetWriter

WEIGHTS = (0.7, 0.299, 0.001)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[Path]:
    """Three datasets of one repeated token each, which tells where a sample comes from."""
    made = []
    for number in range(3):
        made.append(tmp_path / f"set{number}")
        with IndexedDatasetWriter(made[-1], 256) as writer:
            for _ in range(10):
                writer.add_document(np.arange(400) % 20 + 50 * number)
    return made


def blend(prefixes: list[Path], seed: int = 5) -> BlendedStream:
    streams = [SampleStream(IndexedDataset(p), 8, seed, 256) for p in prefixes]
    return BlendedStream(streams, WEIGHTS, seed)


@pytest.mark.parametrize("length", [1_000, 2_048, 30_000])
def test_each_dataset_has_its_share_of_any_stretch(prefixes: list[Path], length: int) -> None:
    stream = blend(prefixes)
    found = Counter(stream.place(sample)[0] for sample in range(length))
    for source, weight in enumerate(WEIGHTS):
        # Within a block of 2,000 the order is drawn; at its end the shares are exact.
        slack = 1 if length % 2000 == 0 else 4 * (2000 * weight) ** 0.5 + 1
        assert abs(found[source] - length * weight) <= slack


def test_each_dataset_is_read_in_its_own_order_without_gaps(prefixes: list[Path]) -> None:
    stream = blend(prefixes)
    numbers: dict[int, list[int]] = {}
    for sample in range(7_000):
        source, number = stream.place(sample)
        numbers.setdefault(source, []).append(number)
    assert set(numbers) == {0, 1, 2}
    for found in numbers.values():
        assert found == list(range(len(found)))


def test_a_sample_does_not_depend_on_what_was_read_before(prefixes: list[Path]) -> None:
    in_turn, late = blend(prefixes), blend(prefixes)
    whole = [in_turn.batch(first, 4) for first in range(0, 6_000, 4)]
    for number in (1_400, 0, 700, 701):
        for ours, theirs in zip(late.batch(4 * number, 4), whole[number], strict=True):
            assert np.array_equal(ours, theirs)
    sources = {int(row[0]) // 50 for inputs, _ in whole for row in inputs}
    assert sources == {0, 1, 2}
    assert [blend(prefixes, 6).place(k)[0] for k in range(50)] != [
        in_turn.place(k)[0] for k in range(50)
    ]


def test_a_run_on_a_blend_resumes_and_validates_on_it(
    in_process: InProcess, prefixes: list[Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [f"data=0.6 {prefixes[0]} 0.4 {prefixes[1]}", "eval_interval=2", "split=8,2,0",
             "eval_iters=1"]  # fmt: skip
    whole = in_process.train(run, *words)
    step_back(run, 4)
    assert in_process.train(run, *words) == {i: whole[i] for i in (5, 6)}


def test_a_blend_is_read_as_megatron_reads_it(tmp_path: Path) -> None:
    assert parse("my corpus") == [(1.0, "my corpus")]
    assert parse("0.3 a 2 b") == [(0.3, "a"), (2.0, "b")]
    assert resolved(f"{tmp_path}/x") == f"{tmp_path}/x"
    assert resolved(f"0.25 {tmp_path}/x 3 {tmp_path}/y") == f"0.25 {tmp_path}/x 3 {tmp_path}/y"
    with pytest.raises(UsageError, match="each weight must be a number above 0"):
        load_config(Path("train/configs/tiny.yaml"), ["save=x", "data=0.5 a -1 b"])


def test_one_dataset_is_the_stream_that_it_was(prefixes: list[Path]) -> None:
    plain = SampleStream(IndexedDataset(prefixes[0]), 8, 5, 256)
    opened, held_out = open_streams(str(prefixes[0]), 8, 5, 256, [1.0, 0.0, 0.0], held_out=False)
    assert isinstance(opened, SampleStream)
    for stream in (opened, held_out):
        assert np.array_equal(stream.batch(3, 2)[0], plain.batch(3, 2)[0])
