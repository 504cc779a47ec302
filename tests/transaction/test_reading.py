"""Ranges that are read past the page cache: the same bytes, wherever they begin and end."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon.transaction.reading import ALIGN, LONG, Reader, Rooms
from tests.support.direct import takes_direct_calls

SIZE = 3 * LONG + 4321


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


RANGES = [(0, SIZE), (1, SIZE - 1), (ALIGN, 2 * LONG + ALIGN), (4095, LONG + 4095), (77, 5000),
          (SIZE - 10, SIZE), (9, 9)]  # fmt: skip


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(("start", "end"), RANGES)
def test_parts_are_those_of_the_file(file: Path, start: int, end: int, once: bool) -> None:
    """Of any size up to `most`, across the rooms' ends; and all at once."""
    whole = file.read_bytes()[start:end]
    most = 30_000
    (room,) = Rooms().get(1, 80_000)
    sizes = random.Random(1)
    with Reader(file, start, end, room, most, once=once) as reader:
        at = 0
        while part := bytes(reader.next(size := sizes.randint(1, most))):
            assert part == whole[at : at + size]
            at += len(part)
    assert at == len(whole)
    with Reader(file, start, end, room, once=once) as reader:
        assert b"".join(map(bytes, reader.all())) == whole


def test_what_lacks_is_not_made_up(file: Path) -> None:
    (room,) = Rooms().get(1, 1 << 20)
    with Reader(file, SIZE - 5, SIZE + LONG, room) as reader:
        assert b"".join(map(bytes, reader.all())) == file.read_bytes()[-5:]
    with Reader(file, SIZE + 5, SIZE + 2 * LONG, room) as reader:
        assert list(reader.all()) == [] and list(reader.next(3)) == []


def test_a_long_range_is_read_past_the_cache(file: Path) -> None:
    """Where the file system can: as here, or the test says so."""
    if not takes_direct_calls(file):
        pytest.skip("the file system of the tests has no direct reads")
    (room,) = Rooms().get(1, 1 << 20)
    for size, once, direct in ((LONG, True, True), (LONG - 1, True, False), (LONG, False, False)):
        with Reader(file, 0, size, room, once=once) as reader:
            assert reader._direct == direct


@pytest.mark.parametrize("at", ["open", "the first read", "a later read", "a short read"])
def test_a_file_system_without_direct_reads(
    file: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Refused, or cut short at any byte, they go on through the cache."""
    opened, read, reads = os.open, os.preadv, 0

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if at == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more, **named)

    def preadv(descriptor: int, buffers: Any, position: int) -> int:
        nonlocal reads
        reads += 1
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if direct and (at == "the first read" or (at == "a later read" and reads > 2)):
            raise OSError(errno.EINVAL, "Invalid argument")
        if direct and at == "a short read" and reads == 3:
            buffers = [buffers[0][:1234]]
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDONLY)
        return read(descriptor, buffers, position)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    (room,) = Rooms().get(1, 1 << 19)
    with Reader(file, 3, SIZE - 3, room) as reader:
        found = b"".join(map(bytes, reader.all()))
        assert not reader._direct
    assert found == file.read_bytes()[3:-3]


def test_other_errors_are_raised(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    (room,) = Rooms().get(1, 1 << 19)
    with Reader(file, 0, SIZE, room) as reader, pytest.raises(OSError, match="Input"):
        reader.next(1)
