"""Bytes that are computed while they are staged: torch's numbers, a true CRC, bounded memory."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.files.archives.append import render
from ckptsurgeon.files.archives.archive import Archive
from ckptsurgeon.plans.edits import Change, Computed, Content
from ckptsurgeon.plans.sources import Source
from ckptsurgeon.transaction import computing, read_back
from ckptsurgeon.transaction.arithmetic import computed, floats, from_floats
from ckptsurgeon.transaction.computing import Sum
from ckptsurgeon.transaction.staging import _Staged, _write

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}  # fmt: skip


def data_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def everywhere() -> torch.Tensor:
    """float32 of all exponents and signs, ties of bfloat16 among them, both zeros, infinities."""
    bits = torch.arange(-(1 << 31), 1 << 31, 65521, dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(0, 1 << 16, 7, dtype=torch.int64) << 16 | 0x8000).to(torch.int32)
    values = torch.cat([bits, ties, ties + 1, ties - 1]).view(torch.float32)
    return values[~values.isnan()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_torchs(dtype: str) -> None:
    values = everywhere()
    assert from_floats(values.numpy(), dtype) == data_of(values.to(DTYPES[dtype]))
    back = floats(data_of(values.to(DTYPES[dtype])), dtype)
    assert torch.equal(torch.from_numpy(back.copy()).float(), values.to(DTYPES[dtype]).float())


def test_a_nan_stays_one() -> None:
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert (
        torch.frombuffer(bytearray(from_floats(nans.numpy(), "bfloat16")), dtype=torch.bfloat16)[:]
        .isnan()
        .all()
    )


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    st.sampled_from(sorted(DTYPES)),
    st.floats(-4, 4).filter(lambda f: abs(f) > 1e-3),
)
def test_a_rule_is_torchs_expression(numbers: list[float], dtype: str, by: float) -> None:
    one = torch.tensor(numbers, dtype=DTYPES[dtype])
    two = torch.tensor(numbers[::-1], dtype=DTYPES[dtype])
    term = (Source("f", 0, 0, dtype),)
    scaled = computed(Computed("scale", dtype, 0, (term,), (by,)), [data_of(one)], [dtype])
    assert scaled == data_of(one * by)
    mean = Computed("mean", dtype, 0, (term, term), (1.0, 3.0))
    expected = ((one.double() * 1.0 + two.double() * 3.0) / 4.0).to(DTYPES[dtype])
    if torch.isfinite(expected).all():
        assert computed(mean, [data_of(one), data_of(two)], [dtype] * 2) == data_of(expected)
    least = computed(Computed("ceiling", dtype, 0, (term,), (0.5,)), [data_of(one)], [dtype])
    assert least == data_of(one.clamp(max=0.5))


def test_weights_are_rounded_from_their_masters() -> None:
    """Never averaged in bf16: the mean of the rounded ones is another number."""
    masters = [torch.tensor([1.0038]), torch.tensor([1.0116])]
    term = (Source("f", 0, 0, "float32"),)
    piece = Computed("mean", "bfloat16", 0, (term, term), (1.0, 1.0), via="float32")
    found = computed(piece, [data_of(m) for m in masters], ["float32"] * 2)
    assert found == data_of(((masters[0].double() + masters[1]) / 2).float().bfloat16())
    assert found != data_of((masters[0].bfloat16() + masters[1].bfloat16()) / 2)


def staged(folder: Path, content: Content, jobs: int = 2) -> Path:
    _write(folder, [_Staged("new", content)], jobs)
    return folder / "new"


@pytest.mark.parametrize("legacy", [False, True])
def test_a_new_file_is_torchs_and_its_crcs_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool
) -> None:
    """In many slices, from terms that lie in parts of several files, beside what stays."""
    monkeypatch.setattr(computing, "BLOCK", 7)
    monkeypatch.setattr(computing, "STRETCH", 17)
    torch.manual_seed(0)
    flat = torch.randn(60)
    state = {
        "flat": flat,
        "view": flat[40:],
        "other": torch.randn(5),
        "half": torch.randn(3, 4).half(),
    }
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    (tmp_path / "raw").write_bytes(b"\0" * 3 + data_of(flat))
    term = (Source("raw", 3, 3 + 40, "float32"), Source("raw", 43, 43 + 60, "float32"))
    half = (Source("raw", 3, 3 + 48, "float32"),)
    changes = [
        Change("a.pt", "flat", "values", Computed("scale", "float32", 100, (term,), (0.5,)),
               ("flat",), (10, 35)),
        Change("a.pt", "half", "values", Computed("copy", "float16", 24, (half,)), ("half",)),
    ]  # fmt: skip
    content = render(tmp_path / "a.pt", "a.pt", changes)
    assert isinstance(content, Content)
    new = staged(tmp_path, content)
    loaded = torch.load(new, weights_only=False)
    expected = flat.clone()
    expected[10:35] = flat[:25] * 0.5
    assert torch.equal(loaded["flat"], expected)
    assert torch.equal(loaded["view"], expected[40:])
    assert torch.equal(loaded["other"], state["other"])
    assert torch.equal(loaded["half"], flat[:12].half().view(3, 4))
    if not legacy:
        with zipfile.ZipFile(new) as archive:
            assert archive.testzip() is None
        assert Archive.open(new).tree().keys() == state.keys()


def test_numbers_that_meet_are_refused(tmp_path: Path) -> None:
    """Of the whole tensor and of a part of it: one after the other they would be too long."""
    torch.save({"flat": torch.randn(6)}, tmp_path / "a.pt")
    changes = []
    for start, end in ((0, 6), (2, 4)):
        size = 4 * (end - start)
        new = Computed("scale", "float32", size, ((Source("a.pt", 0, size, "float32"),),), (2.0,))
        changes.append(Change("a.pt", "flat", "values", new, ("flat",), (start, end)))
    with pytest.raises(SurgeryError, match="two numbers in one place"):
        render(tmp_path / "a.pt", "a.pt", changes)


def test_shared_bytes_are_refused(tmp_path: Path) -> None:
    flat = torch.randn(6)
    torch.save({"flat": flat, "view": flat[2:]}, tmp_path / "a.pt")
    term = (Source("a.pt", 0, 24, "float32"),)
    change = Change(
        "a.pt", "flat", "values", Computed("scale", "float32", 24, (term,), (2.0,)), ("flat",)
    )
    with pytest.raises(SurgeryError, match="shares the bytes"):
        render(tmp_path / "a.pt", "a.pt", [change])


def test_a_source_that_shrinks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\0" * 16)
    piece = Computed("copy", "float32", 32, ((Source("raw", 0, 32, "float32"),),))
    with pytest.raises(SurgeryError, match="shrank while"):
        staged(tmp_path, Content((piece,)))


def test_what_does_not_read_back_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raw").write_bytes(b"\1" * 32)
    piece = Computed("copy", "float32", 32, ((Source("raw", 0, 32, "float32"),),))
    monkeypatch.setattr(computing.zlib, "crc32", lambda *_: 7)
    real = read_back.zlib

    class Other:
        crc32 = staticmethod(lambda *_: 8)

    monkeypatch.setattr(read_back, "zlib", Other)
    with pytest.raises(SurgeryError, match="does not read back"):
        staged(tmp_path, Content((piece,)))
    assert real is not None


def test_a_checksum_joins_what_was_computed_and_what_was_copied() -> None:
    import zlib

    from ckptsurgeon.plans.edits import Checksum

    data = bytes(range(200))
    sums = [Sum(50, 20, zlib.crc32(data[50:70])), Sum(70, 30, zlib.crc32(data[70:100]))]
    found = computing.resolved(
        Checksum(40 - 7, 100), 7, sums, lambda offset, size: data[offset : offset + size]
    )
    assert int.from_bytes(found, "little") == zlib.crc32(data[40:140])


@pytest.mark.long
def test_memory_stays_below_256_mb_whatever_the_size(tmp_path: Path) -> None:
    """The mean of two terms of 320 MB each, in eight threads; the sources are holes."""
    size = 320 << 20
    for name in ("a", "b"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    code = (
        "import sys, numpy, resource; from pathlib import Path\n"
        "from ckptsurgeon.plans.edits import Computed, Content\n"
        "from ckptsurgeon.plans.sources import Source\n"
        "from ckptsurgeon.transaction.staging import _Staged, _write\n"
        f"root, size = Path({str(tmp_path)!r}), {size}\n"
        "terms = tuple((Source(name, 0, size, 'float32'),) for name in ('a', 'b'))\n"
        "piece = Computed('mean', 'float32', size, terms, (1.0, 1.0))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "_write(root, [_Staged('new', Content((piece,)))], 8)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 256 << 10
    assert (tmp_path / "new").stat().st_size == size


def test_memory_stays_below_256_mb_however_many_terms(tmp_path: Path) -> None:
    """The mean of 24 steps, in eight threads."""
    size = 16 << 20
    with (tmp_path / "a").open("wb") as file:
        file.truncate(size)
    code = (
        "import resource, numpy; from pathlib import Path\n"
        "from ckptsurgeon.plans.edits import Computed, Content\n"
        "from ckptsurgeon.plans.sources import Source\n"
        "from ckptsurgeon.transaction import computing, staging\n"
        "computing.STRETCH = 1 << 19\n"
        f"size, terms = {size}, ((Source('a', 0, {size}, 'float32'),),) * 24\n"
        "piece = Computed('mean', 'float32', size, terms, (1.0,) * 24)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"staged = [staging._Staged('new', Content((piece,)))]\n"
        f"staging._write(Path({str(tmp_path)!r}), staged, 8)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 256 << 10


def test_each_source_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters that two ranks hold, and the weights that are rounded from both: two files, cut in
    another way, and a copy of one of them."""
    torch.manual_seed(0)
    steps = [torch.randn(100), torch.randn(100)]
    for name, flat in zip("ab", steps, strict=True):
        (tmp_path / name).write_bytes(data_of(flat))
    monkeypatch.setattr(computing, "BLOCK", 7)
    monkeypatch.setattr(computing, "STRETCH", 16)

    def part(start: int, end: int) -> tuple[tuple[Source, ...], ...]:
        return tuple((Source(name, start * 4, end * 4, "float32"),) for name in "ab")

    def mean(dtype: str, size: int, terms: tuple[tuple[Source, ...], ...]) -> Computed:
        return Computed("mean", dtype, size, terms, (1.0, 1.0), "float32")

    ranks = [part(0, 61), part(61, 100)]
    whole = tuple(one + other for one, other in zip(*ranks, strict=True))
    contents = {
        "rank0": Content((b"head", mean("float32", 244, ranks[0]))),
        "rank1": Content((mean("float32", 156, ranks[1]), b"tail")),
        "weights": Content((b"12", mean("bfloat16", 200, whole), b"34")),
        "copy": Content((mean("bfloat16", 200, whole),)),
    }
    read = 0
    real = os.preadv

    def counted(descriptor: int, rooms: Any, at: int) -> int:
        nonlocal read
        done = real(descriptor, rooms, at)
        source = Path(f"/proc/self/fd/{descriptor}").readlink().name in ("a", "b")
        read += done if source else 0  # what is read back is read this way, too
        return done

    monkeypatch.setattr(os, "preadv", counted)
    _write(tmp_path, [_Staged(name, content) for name, content in contents.items()], 3)
    assert read == sum((tmp_path / name).stat().st_size for name in "ab")
    expected = ((steps[0].double() + steps[1].double()) / 2).float()
    masters, weights = data_of(expected), data_of(expected.bfloat16())
    found = {name: (tmp_path / name).read_bytes() for name in contents}
    assert found["rank0"] == b"head" + masters[:244]
    assert found["rank1"] == masters[244:] + b"tail"
    assert found["weights"] == b"12" + weights + b"34" and found["copy"] == weights


@pytest.mark.parametrize("sizes", [(12, 16), (16, 12)])
def test_sources_of_another_length_are_an_error(tmp_path: Path, sizes: tuple[int, int]) -> None:
    (tmp_path / "raw").write_bytes(bytes(16))
    terms = tuple((Source("raw", 0, size, "float32"),) for size in sizes)
    with pytest.raises(SurgeryError, match="another number of elements"):
        staged(tmp_path, Content((Computed("mean", "float32", 16, terms, (1.0, 1.0)),)))


@pytest.mark.parametrize("numbers", [(math.nan,), (0.0,)])
def test_bytes_are_the_same_whatever_the_slices(
    numbers: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As torch's product with 0 and NaN, which operations refuse before."""
    values: Any = torch.randn(1000)
    buffer = io.BytesIO(data_of(values))
    (tmp_path / "raw").write_bytes(buffer.getvalue())
    piece = Computed("scale", "bfloat16", 2000, ((Source("raw", 0, 4000, "float32"),),), numbers)
    whole = staged(tmp_path, Content((piece,))).read_bytes()
    (tmp_path / "new").unlink()
    monkeypatch.setattr(computing, "BLOCK", 13)
    monkeypatch.setattr(computing, "STRETCH", 50)
    assert staged(tmp_path, Content((piece,)), jobs=4).read_bytes() == whole
