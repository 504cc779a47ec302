"""Shards stay open from the commit to their last write: what takes the name of one meanwhile gets
no byte. Nor is the surgery done where somebody else writes to one."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest

from bench.layout import many
from ckptsurgeon.errors import InterruptedSurgery, SurgeryError
from tests.support.snapshot import snapshot
from tests.transaction.written_over import (
    SHARDS,
    Call,
    applied,
    refused_whenever_written_over,
    write_over,
)


def may_hold(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * number, 2 * number))


@pytest.mark.parametrize("number", [0, 1, SHARDS])
def test_who_may_have_few_descriptors_writes_the_same(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    many(tmp_path / "template", SHARDS)
    for name, held in (("usual", 512), ("few", number)):
        root = tmp_path / name
        shutil.copytree(tmp_path / "template", root)
        may_hold(held, monkeypatch)
        applied(root)
        found.append({file.name: file.read_bytes() for file in root.glob("global_step*/*")})
    assert len(found[0]) > SHARDS
    assert found[0] == found[1]


@pytest.mark.parametrize("number", [0, 1, SHARDS])
@pytest.mark.parametrize("undo", [False, True], ids=["surgery", "undo"])
@pytest.mark.long
def test_what_takes_the_name_of_a_shard_is_not_written_to(
    tmp_path: Path, undo: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_hold(number, monkeypatch)
    many(tmp_path / "template", SHARDS)
    if undo:
        applied(tmp_path / "template")
    (shard, *_) = sorted((tmp_path / "template").glob("global_step*/*zero_pp*"))
    name = shard.relative_to(tmp_path / "template")
    root = tmp_path / "run"
    shutil.copytree(tmp_path / "template", root)
    calls = applied(root, undo=undo)
    own = [i for i, (_, path) in enumerate(calls) if path == str(root / name)]
    last = max(i for i in own if calls[i][0] in ("write", "truncate"))
    refused = 0
    for at in range(min(own), len(calls)):
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "template", root)
        other = tmp_path / "other"
        bytes_of_other = shard.read_bytes()[::-1]
        other.write_bytes(bytes_of_other)

        def swap(number: int, _: Call, at: int = at, other: Path = other) -> None:
            if number == at:
                other.replace(root / name)

        try:
            applied(root, swap, undo)
        except (SurgeryError, OSError):
            refused += 1
        else:
            assert at >= last, calls[at]
        assert (root / name).read_bytes() == bytes_of_other, calls[at]
    assert refused >= last - min(own)


@pytest.mark.parametrize("number", [1, SHARDS])
@pytest.mark.parametrize("undo", [False, True], ids=["surgery", "undo"])
@pytest.mark.long
def test_a_shard_that_somebody_writes_to_is_refused(
    tmp_path: Path, undo: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_hold(number, monkeypatch)
    refused_whenever_written_over(tmp_path, undo)


@pytest.mark.parametrize("undo", [False, True], ids=["surgery", "undo"])
@pytest.mark.long
def test_what_was_written_to_unseen_is_refused_before_the_commit(
    tmp_path: Path, undo: bool
) -> None:
    """Size and mtime stay, as within one second where times are whole seconds: then `recover` would
    meet other bytes for ever."""
    root, template, other = tmp_path / "run", tmp_path / "template", b"other" * 300
    many(template, SHARDS)
    if undo:
        applied(template)
    shutil.copytree(template, root)
    calls = applied(root, undo=undo)
    commit = max(i for i, (_, path) in enumerate(calls) if path.endswith("/journal.new"))
    (shard, *_) = sorted(template.glob("global_step*/*zero_pp*"))
    name = shard.relative_to(template)
    for at in range(commit):
        shutil.rmtree(root)
        shutil.copytree(template, root)

        def write(number: int, _: Call, at: int = at) -> None:
            if number == at:
                times = (root / name).stat()
                write_over(root / name, other, times.st_size - len(other))
                os.utime(root / name, ns=(times.st_atime_ns, times.st_mtime_ns))

        with pytest.raises(SurgeryError) as refused:
            applied(root, write, undo)
        assert not isinstance(refused.value, InterruptedSurgery), calls[at]
        shutil.copy2(shard, root / name)
        assert snapshot(root, own=True) == snapshot(template, own=True), calls[at]
