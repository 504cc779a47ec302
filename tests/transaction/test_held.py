"""Shards stay open from the commit to their last write: what takes the name of one meanwhile gets
no byte. Nor is the surgery done where somebody else writes to one."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest

from bench.layout import many
from ckptsurgeon.errors import SurgeryError
from tests.transaction.written_over import SHARDS, Call, applied, refused_whenever_written_over


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
def test_a_shard_that_somebody_writes_to_is_refused(
    tmp_path: Path, undo: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_hold(number, monkeypatch)
    refused_whenever_written_over(tmp_path, undo)
