"""From the first byte of an Append to its last, no reader finds an archive: it fails loudly."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from ckptsurgeon.errors import DamagedFile
from ckptsurgeon.files.archives.append import FIRST_GAP, Archive, render
from ckptsurgeon.plans.edits import ZEROS, Append
from tests.support.torch_files import GROUPS, STATE, apply, change, load, plain_shard, save

Partly = Callable[[Path, Append], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(plain_shard(numel=50_000), tmp_path_factory.mktemp("shard") / "shard.pt")


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "shard.pt"))


@pytest.fixture
def edit(path: Path) -> Append:
    """One with a hole in it, that needs more than one write before the last."""
    found = render(
        path, "shard.pt", [change((*GROUPS, 0, "lr"), 3e-5), change((*STATE, 0, "exp_avg"), ZEROS)]
    )
    assert isinstance(found, Append)
    return found


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def nobody_reads(path: Path) -> None:
    for mmap, weights_only in ((False, False), (True, True)):
        with pytest.raises(RuntimeError, match="central directory"):
            load(path, mmap, weights_only)
    with pytest.raises(zipfile.BadZipFile):
        zipfile.ZipFile(path)
    with pytest.raises(DamagedFile, match="no zip end record"):
        Archive.open(path)


def test_the_last_write_is_the_end_record(path: Path, edit: Append) -> None:
    *bodies, (offset, end) = edit.writes
    assert len(end) == 22 and end[:4] == b"PK\5\6" and offset + 22 == edit.new_size
    assert len(bodies) > 1 and bodies[0][0] == edit.old_size + FIRST_GAP
    for (start, data), (after, _) in pairwise(bodies):
        assert start + len(data) < after
    assert bodies[-1][0] + len(bodies[-1][1]) == offset


def test_no_reader_finds_the_old_state_once_the_file_is_extended(path: Path, edit: Append) -> None:
    truncate(path, edit.new_size - 22)
    nobody_reads(path)
    truncate(path, edit.old_size)
    truncate(path, edit.new_size)
    nobody_reads(path)


def test_no_reader_finds_it_while_bodies_are_written_without_extending(
    path: Path, edit: Append
) -> None:
    for offset, data in [*edit.writes][:-1]:
        for length in (1, 2, 3, 30, len(data) // 2, len(data) - 1, len(data)):
            write(path, offset, data[:length])
            nobody_reads(path)


@pytest.mark.parametrize("extended", [True, False])
def test_no_reader_finds_the_new_state_before_its_last_byte(
    path: Path, edit: Append, extended: bool
) -> None:
    *bodies, (offset, end) = edit.writes
    if extended:
        truncate(path, edit.new_size - 22)
    for start, data in bodies:
        write(path, start, data)
    for length in range(22):
        write(path, offset, end[:length])
        nobody_reads(path)
    write(path, offset, end)
    tree = load(path)["optimizer_state_dict"]["base_optimizer_state"]
    assert tree["param_groups"][0]["lr"] == 3e-5 and not tree["state"][0]["exp_avg"].any()


def test_unzip_does_not_find_the_old_state_either(path: Path, edit: Append) -> None:
    if not shutil.which("unzip"):
        pytest.skip("unzip is not installed")
    write(path, edit.old_size + FIRST_GAP, b"x")
    assert subprocess.run(["unzip", "-tqq", str(path)], capture_output=True).returncode == 9
    truncate(path, edit.old_size)
    apply(path, edit)
    assert subprocess.run(["unzip", "-tqq", str(path)], capture_output=True).returncode == 0
