"""Shards stay open from their check to their last write: what takes the name of one meanwhile gets
no byte, and the surgery is not done."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.layout import many
from ckptsurgeon import Run, apply, disk, plan
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data

RECIPE = from_data({"set": {"lr": 3e-5}, "reset": ["moments"]})
SHARDS = 3
Call = tuple[str, str]


def may_hold(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * number, 2 * number))


def applied(root: Path, at: Callable[[int, Call], None] = lambda *_: None) -> list[Call]:
    """The calls that a surgery makes; `at` is told of each before it is made."""
    made: list[Call] = []

    def hook(operation: str, path: str, _: Any) -> None:
        made.append((operation, path))
        at(len(made) - 1, made[-1])

    run = Run.open(root)
    wanted = plan(run, RECIPE)
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
def test_what_takes_the_name_of_a_shard_is_not_written_to(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_hold(number, monkeypatch)
    many(tmp_path / "template", SHARDS)
    (shard, *_) = sorted((tmp_path / "template").glob("global_step*/*zero_pp*"))
    name = shard.relative_to(tmp_path / "template")
    root = tmp_path / "run"
    shutil.copytree(tmp_path / "template", root)
    calls = applied(root)
    own = [i for i, (_, path) in enumerate(calls) if path == str(root / name)]
    last = max(i for i in own if calls[i][0] == "write")
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
            applied(root, swap)
        except (SurgeryError, OSError):
            refused += 1
        else:
            assert at >= last, calls[at]
        assert (root / name).read_bytes() == bytes_of_other, calls[at]
    assert refused >= last - min(own)
