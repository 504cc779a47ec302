"""Zeroed tensors cost no blocks, keep their neighbours, and have the CRC of real zeros."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.append import Archive
from ckptsurgeon.files.archives.storage_edit import ranges
from ckptsurgeon.files.pickles.tree import Tensor
from ckptsurgeon.plans.edits import ZEROS, Append, Content
from ckptsurgeon.transaction import crc32
from tests.support.torch_files import change, edited, frozen, load, save


@given(st.integers(0, 100_000), st.binary(max_size=50), st.binary(max_size=50), st.binary())
def test_crcs_are_computed_without_the_bytes(count: int, a: bytes, b: bytes, c: bytes) -> None:
    assert crc32.of_zeros(count) == zlib.crc32(bytes(count))
    assert crc32.joined(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
    other = bytes(byte ^ 0x5A for byte in b)
    patched = crc32.replaced(zlib.crc32(a + b + c), zlib.crc32(b), zlib.crc32(other), len(c))
    assert patched == zlib.crc32(a + other + c)


def test_whole_storages_become_holes(tmp_path: Path) -> None:
    numel = 1 << 20
    tree = {"p": torch.ones(numel), "exp_avg": torch.ones(numel), "exp_avg_sq": torch.ones(numel)}
    path = save(tree, tmp_path / "shard.pt")
    blocks = path.stat().st_blocks
    edit = edited(path, change(("exp_avg",), ZEROS), change(("exp_avg_sq",), ZEROS))
    assert isinstance(edit, Append) and sum(len(data) for _, data in edit.writes) < 4096
    assert path.stat().st_size > edit.old_size + 8 * numel
    assert (path.stat().st_blocks - blocks) * 512 < 64 << 10
    for mmap in (False, True):
        loaded = load(path, mmap)
        assert loaded["p"].sum() == numel
        assert not loaded["exp_avg"].any() and not loaded["exp_avg_sq"].any()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    archive_now = Archive.open(path)
    assert archive_now.is_zero(archive_now.tree()["exp_avg"])
    assert not archive_now.is_zero(archive_now.tree()["p"])


def test_views_of_one_storage_are_zeroed_alone(tmp_path: Path) -> None:
    flat = torch.arange(1.0, 101)
    square = torch.arange(1.0, 101).view(10, 10)
    tree = {
        "head": flat[:30], "middle": flat[30:60].view(5, 6), "tail": flat[60:],
        "columns": square[:, 2:5], "left": square[:, :2], "right": square[:, 5:].t(),
    }  # fmt: skip
    path = save(tree, tmp_path / "shard.pt")
    expected = load(path)
    edited(path, change(("middle",), ZEROS), change(("head",), ZEROS), change(("columns",), ZEROS))
    for name in ("middle", "head", "columns"):
        expected[name].zero_()
    assert frozen(load(path)) == frozen(expected)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_bytes_of_another_tensor_are_not_zeroed_with_it(tmp_path: Path) -> None:
    flat = torch.ones(10)
    path = save({"a": flat[:6], "b": {"c": flat[5:]}, "step": flat[9]}, tmp_path / "shard.pt")
    with pytest.raises(SurgeryError, match=r"the tensor b\.c shares the bytes"):
        edited(path, change(("a",), ZEROS))
    with pytest.raises(SurgeryError, match="shares the bytes"):
        edited(path, change(("step",), 3.0))
    with pytest.raises(SurgeryError, match="zero and a number"):
        edited(path, change(("b", "c"), ZEROS), change(("step",), 3.0))
    edited(path, change(("a",), ZEROS), change(("b", "c"), ZEROS), change(("step",), ZEROS))
    assert not load(path)["b"]["c"].any()


def test_one_tensor_under_two_names_is_one_tensor(tmp_path: Path) -> None:
    step = torch.tensor(5.0)
    path = save({"a": step, "b": step}, tmp_path / "shard.pt")
    edited(path, change(("a",), 7), change(("b",), 7))
    assert load(path)["a"] is not None and load(path)["b"] == 7
    with pytest.raises(SurgeryError, match="two numbers"):
        edited(path, change(("a",), 7), change(("b",), 8))


@pytest.mark.parametrize("numel", [(1 << 30) + 5])
def test_storages_over_4_gib_need_no_space(tmp_path: Path, numel: int) -> None:
    path = tmp_path / "shard.pt"
    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(numel), "small": torch.empty(8), "lr": 1.0}, path)
    size = path.stat().st_size
    assert size > 4 * numel
    edit = edited(path, change(("big",), ZEROS), change(("small",), ZEROS), change(("lr",), 2.0))
    assert isinstance(edit, Append) and path.stat().st_size > 2 * size - (1 << 20)
    assert path.stat().st_blocks * 512 < 1 << 20
    loaded = load(path, mmap=True)
    assert loaded["big"].shape == (numel,) and loaded["lr"] == 2.0
    assert not loaded["big"][-100:].any() and not loaded["small"].any()
    with zipfile.ZipFile(path) as archive:
        big = archive.getinfo("shard/data/0")
        assert big.file_size == 4 * numel and big.header_offset > size
        assert crc32.of_zeros(4 * numel) == big.CRC
        assert archive.read("shard/data/1") == bytes(32)
    # and once more, now that offsets and sizes need zip64 in the old directory too
    edited(path, change(("big",), ZEROS), change(("lr",), 3.0))
    assert load(path, mmap=True)["lr"] == 3.0
    with path.open("r+b") as file:
        file.truncate(size)
    assert load(path, mmap=True)["lr"] == 1.0


def test_small_zeros_are_written_and_large_kept_parts_fall_back(tmp_path: Path) -> None:
    flat = torch.ones(3 << 20)
    path = save({"a": flat[:100], "b": flat[100:]}, tmp_path / "shard.pt")
    edit = edited(path, change(("a",), ZEROS))
    assert isinstance(edit, Content)  # 12 MB of b would be copied by an Append
    assert not load(path)["a"].any() and load(path)["b"].sum() == (3 << 20) - 100
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@given(st.data())
def test_ranges_are_the_bytes_that_zero_touches(data: st.DataObject) -> None:
    size = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    stride = tuple(data.draw(st.integers(0, 9)) for _ in size)
    offset = data.draw(st.integers(0, 5))
    storage = torch.ones(100)
    storage.as_strided(size, stride, offset).zero_()
    touched: set[int] = set()
    tensor = Tensor("float32", "0", 100, offset, size, stride)
    for start, end in ranges(tensor):
        assert start % 4 == end % 4 == 0
        touched |= set(range(start // 4, end // 4))
    assert touched == {i for i in range(100) if storage[i] == 0}


def test_numbers_of_an_archive_inside_a_larger_file_are_its_own(tmp_path: Path) -> None:
    """As in a `.distcp` file; the first archive in it has records of the same names and places."""
    both = io.BytesIO()
    ends = [0]
    for number in (1.0, 2.0):
        alone = io.BytesIO()
        torch.save({"step": torch.tensor(number)}, alone)
        both.write(alone.getvalue())
        ends.append(both.tell())
    path = tmp_path / "both"
    path.write_bytes(both.getvalue())
    for start, end, wanted in ((0, ends[1], 1.0), (ends[1], ends[2], 2.0)):
        archive = Archive.open(path, start, end - start)
        step = archive.tree()["step"]
        with archive.reading():
            assert archive.values([step]) == [wanted]
