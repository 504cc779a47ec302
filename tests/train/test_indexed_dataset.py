"""The .bin/.idx pair is Megatron's: its bytes, its documents, and other readers' view of it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from train.errors import TrainError
from train.indexed_dataset import IndexedDataset, IndexedDatasetWriter

DOCUMENTS = [[5, 6, 7], [8], [], [9, 10]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, vocab: int = 256) -> Path:
    with IndexedDatasetWriter(prefix, vocab) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=np.int64))
    return prefix


def test_documents_come_back_and_lie_back_to_back(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "a"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[5, 6, 7], [8], [9, 10]]
    assert dataset.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert dataset.document_index.tolist() == [0, 1, 2, 3]


def test_the_index_has_the_layout_that_megatron_reads(tmp_path: Path) -> None:
    index = write(tmp_path / "a").with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<QBQQ", index, 9) == (1, 8, 3, 4)  # version, uint16, seqs, docs
    assert np.frombuffer(index, "<i4", 3, 34).tolist() == [3, 1, 2]
    assert np.frombuffer(index, "<i8", 3, 46).tolist() == [0, 6, 8]
    assert np.frombuffer(index, "<i8", 4, 70).tolist() == [0, 1, 2, 3]
    assert len(index) == 102


def test_deepspeeds_copy_of_megatrons_reader_reads_it(tmp_path: Path) -> None:
    module = pytest.importorskip("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset")
    # Four-byte ids: that copy has its own meaning for the code of two-byte ones.
    prefix = write(tmp_path / "a", vocab=100_000)
    theirs = module.MMapIndexedDataset(str(prefix), skip_warmup=True)
    assert [theirs[i].tolist() for i in range(len(theirs))] == [[5, 6, 7], [8], [9, 10]]
    assert theirs.doc_idx.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("vocab", "dtype"), [(256, np.uint16), (65499, np.uint16), (65500, "i4")])
def test_ids_take_two_bytes_when_they_fit(tmp_path: Path, vocab: int, dtype: str) -> None:
    assert IndexedDataset(write(tmp_path / "a", vocab=vocab)).dtype == np.dtype(dtype)


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), IndexedDatasetWriter(tmp_path / "a", 256) as writer:
        writer.add_document(np.array([1]))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def damage(path: Path, at: int, value: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"X", "no MMIDIDX magic"),
        (9, b"\x02", "index version 2"),
        (17, b"\x06", "dtype code 6"),
        (18, b"\x07", "its header asks for"),
        (54, b"\x01", "back to back"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, at: int, value: bytes, says: str) -> None:
    index = write(tmp_path / "a").with_suffix(".idx")
    damage(index, at, value)
    with pytest.raises(TrainError, match=says) as caught:
        IndexedDataset(tmp_path / "a")
    assert str(index) in caught.value.what


def test_a_short_bin_is_named(tmp_path: Path) -> None:
    data = write(tmp_path / "a").with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(TrainError, match=r"a\.bin: 10 bytes; its index asks for 6 uint16"):
        IndexedDataset(tmp_path / "a")


def test_missing_data_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(TrainError) as caught:
        IndexedDataset(tmp_path / "a")
    assert "prepare-data" in caught.value.next[0]
