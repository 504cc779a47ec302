"""A surgery of few shards, or its undo, while another process writes over one of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.layout import many
from ckptsurgeon import Run, apply, disk, plan, plan_undo
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data

RECIPE = from_data({"set": {"lr": 3e-5}, "reset": ["moments"]})
SHARDS = 3
Call = tuple[str, str]


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
