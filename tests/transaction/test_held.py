"""Shards stay open from the commit to their last write: what takes the name of one meanwhile gets
no byte. Nor is the surgery done where somebody else writes to one."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.layout import many
from ckptsurgeon import Run, apply, disk, plan, plan_undo
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data

RECIPE = from_data({"set": {"lr": 3e-5}, "reset": ["moments"]})
SHARDS = 3
Call = tuple[str, str]


def may_hold(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * number, 2 * number))


def applied(
    root: Path, at: Callable[[int, Call], None] = lambda *_: None, undo: bool = False
) -> list[Call]:
    """The calls that a surgery makes, or its undo; `at` is told of each before it is made."""
    made: list[Call] = []

    def hook(operation: str, path: str, _: Any) -> None:
        made.append((operation, path))
        at(len(made) - 1, made[-1])

    run = Run.open(root)
    wanted = plan_undo(run) if undo else plan(run, RECIPE)
    disk.calls.hook = hook
    try:
        apply(run, wanted, jobs=1)
    finally:
        disk.calls.hook = None
    return made


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


def write_over(shard: Path, data: bytes, at: int) -> None:
    """As a process does that saves in place: its size stays. Two writes within one tick of a fine
    clock, which nobody can tell apart, are made two ticks; those in one second are not."""
    before = shard.stat().st_ctime_ns
    while True:
        with shard.open("r+b") as file:
            file.seek(at)
            file.write(data)
        if before % 10**9 == 0 or shard.stat().st_ctime_ns != before:
            return


@pytest.mark.parametrize("number", [1, SHARDS])
@pytest.mark.parametrize("undo", [False, True], ids=["surgery", "undo"])
def test_a_shard_that_somebody_writes_to_is_refused(
    tmp_path: Path, undo: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_hold(number, monkeypatch)
    refused_whenever_written_over(tmp_path, undo)


def refused_whenever_written_over(folder: Path, undo: bool) -> None:
    """Assert it of each moment until the surgery makes the shard valid, or the undo invalid."""
    root, template, other = folder / "run", folder / "template", b"other" * 300
    many(template, SHARDS)
    (shard, *_) = sorted(template.glob("global_step*/*zero_pp*"))
    name = shard.relative_to(template)
    before = shard.stat().st_size
    if undo:
        applied(template)
    after = shard.stat().st_size

    def begin() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)

    begin()
    calls = applied(root, undo=undo)
    own = [i for i, (_, path) in enumerate(calls) if path == str(root / name)]
    writes = [i for i in own if calls[i][0] in ("truncate", "write")]
    assert calls[writes[0]][0] == "truncate"
    assert len(writes) > 1
    last = writes[0] if undo else writes[-1]
    done = []
    for at in set(range(last)) - set(writes):  # between a comparison and its write nobody can look
        begin()

        def write(number: int, _: Call, at: int = at) -> None:
            if number == at:
                write_over(root / name, other, (after if undo else before) - len(other))

        with contextlib.suppress(SurgeryError, OSError):
            applied(root, write, undo)
            done.append(calls[at])
        assert other in (root / name).read_bytes(), calls[at]
    assert not done
