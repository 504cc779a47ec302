"""However many threads read and edit, the plan, the refusal and the bytes are the same."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.layout import ranks
from ckptsurgeon import Run, apply, plan, plan_undo, workers
from ckptsurgeon.disk.mount import MOUNTS, threads
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.transaction import redo
from ckptsurgeon.workers import files_at_once, side_by_side
from tests.support.snapshot import differs, snapshot

MEMORY = Path("/dev/shm")
"""Where there is one, a file system on which fsync costs nothing."""
LAST, NEWEST = 95000, 95500
RECIPES: Sequence[dict[str, object]] = (
    {"set": {"lr": 3e-5}},
    {"set": {"beta2": 0.9}, "reset": ["moments"]},
    {"rollback": {"to": LAST}, "set": {"eps": 1e-6}},
)
DAMAGES = ("cut", "grown", "gone", "second name", "link", "read-only")


# --- the runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run of so many shards a step."""

    @cache
    def make(shards: int) -> Path:
        root = tmp_path_factory.mktemp("jobs") / "run"
        ranks(root, shards)
        return root

    return make


def shards_of(root: Path, step: int) -> list[Path]:
    return sorted((root / f"global_step{step}").glob("*optim*"))


def damage(path: Path, kind: str) -> None:
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    elif kind == "grown":
        path.write_bytes(path.read_bytes() + b"more")
    elif kind == "gone":
        path.unlink()
    elif kind == "second name":
        path.with_name(f"{path.name}.kept").hardlink_to(path)
    elif kind == "link":
        away = path.parent.parent.parent / path.name
        path.rename(away)
        path.symlink_to(away)
    else:
        path.chmod(0o444)


# --- the law -------------------------------------------------------------------------------------


def told(act: Callable[[], Any]) -> Any:
    """What it gives, or the refusal."""
    try:
        return act()
    except SurgeryError as error:
        return f"{error}"


def hold(
    original: Path,
    recipe: dict[str, object],
    jobs: int,
    damaged: Mapping[int, str],
    changed: frozenset[int],
    bug: AbstractContextManager[object] | None = None,
) -> None:
    """With one thread and with `jobs`, which may have a bug: the plan, the bytes after the apply,
    the plan of its undo and the bytes after that. Shards are damaged before the plan, or changed
    between it and its apply."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        root = Path(folder) / "run"
        shutil.copytree(original, root)
        step = LAST if "rollback" in recipe else NEWEST
        shards = shards_of(root, step)
        for number, kind in damaged.items():
            damage(shards[number % len(shards)], kind)
        before = snapshot(root)
        late = {shards[number % len(shards)] for number in changed}

        def planned(jobs: int) -> Plan | str:
            return told(lambda: plan(Run.open(root), from_data(recipe), jobs=jobs))

        def surgery(jobs: int) -> Iterator[Any]:
            wanted = planned(jobs)
            yield wanted.changes if isinstance(wanted, Plan) else wanted
            if isinstance(wanted, str):
                return
            times = {path: path.stat().st_mtime_ns for path in late}
            for path, time in times.items():
                os.utime(path, ns=(time, time + 1))
            done = told(lambda: apply(Run.open(root), wanted, jobs=jobs))
            yield done if isinstance(done, str) else snapshot(root)
            for path, time in times.items():
                os.utime(path, ns=(time, time))
            if isinstance(done, str):
                return
            back = plan_undo(Run.open(root), jobs=jobs)
            yield [(type(edit), vars(edit).get("file")) for edit in back.edits]
            apply(Run.open(root), back, jobs=jobs)
            yield snapshot(root)

        single = planned(1)
        with bug or nullcontext():
            assert planned(jobs) == single
            several = [*surgery(jobs)]
        for one, other in zip([*surgery(1)], several, strict=True):
            if isinstance(one, dict):
                assert differs(one, other, times=False) is None
            else:
                assert one == other
        assert differs(snapshot(root), before, times=True) is None


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    shards=st.sampled_from([1, 4, 5, 12]),
    recipe=st.sampled_from(RECIPES),
    jobs=st.sampled_from([2, 3, 8, 32]),
    damaged=st.dictionaries(st.integers(0, 11), st.sampled_from(DAMAGES), max_size=3),
    changed=st.frozensets(st.integers(0, 11), max_size=2),
)
@pytest.mark.long
def test_any_number_of_threads_does_what_one_does(
    saved: Callable[[int], Path],
    shards: int,
    recipe: dict[str, object],
    jobs: int,
    damaged: dict[int, str],
    changed: frozenset[int],
) -> None:
    """Of several damaged shards the first is named, whichever thread meets its own first."""
    hold(saved(shards), recipe, jobs, {n % shards: kind for n, kind in damaged.items()}, changed)


# --- mistakes that it finds ----------------------------------------------------------------------

Each = Callable[..., list[Any]]


def out_of_order(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [call(item) for item in items][::-1]


def the_last_error(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [call(item) for item in items[::-1]][::-1]


def no_error(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    def found(item: Any) -> Any:
        try:
            return call(item)
        except SurgeryError:
            return {}

    return [found(item) for item in items]


def one_left_out(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [call(item) for item in items[:-1]]


@pytest.mark.parametrize(
    ("wrong", "where", "damaged", "changed"),
    [
        (out_of_order, workers, {}, []),
        (the_last_error, workers, {2: "cut", 7: "grown"}, []),
        (the_last_error, workers, {}, [2, 7]),
        (no_error, workers, {}, [2]),
        (one_left_out, workers, {}, []),
        (one_left_out, redo, {}, []),
    ],
)
def test_the_law_finds(
    saved: Callable[[int], Path],
    wrong: Each,
    where: Any,
    damaged: dict[int, str],
    changed: list[int],
) -> None:
    right = where.each

    def each(call: Any, items: Sequence[Any], jobs: int, *done: Any) -> list[Any]:
        few = jobs <= 1 or len(items) <= workers.FEW
        return right(call, items, jobs, *done) if few else wrong(call, items)

    bug = patch.object(where, "each", each)
    with pytest.raises((AssertionError, ValueError, SurgeryError)):
        hold(saved(12), RECIPES[0], 8, damaged, frozenset(changed), bug)


# --- the threads ---------------------------------------------------------------------------------


def test_the_error_of_the_first_is_raised_and_no_answer_is_out_of_place() -> None:
    def half(number: int) -> int:
        if number % 7 == 5:
            raise ValueError(number)
        return number // 2

    with files_at_once(32):
        assert side_by_side(half, range(5)) == [0, 0, 1, 1, 2]
        with pytest.raises(ValueError, match=r"^5$"):
            side_by_side(half, range(100))


def test_a_networks_file_system_gets_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = MOUNTS.read_text().splitlines()
    for kind, wanted in (("nfs4", 32), ("fuse.juicefs", 32), ("lustre", 32), ("ext4", 8)):
        changed = (line.split(" - ") for line in lines)
        mounts = tmp_path / "mounts"
        mounts.write_text("".join(f"{a} - {kind} {b.split(' ', 1)[1]}\n" for a, b in changed))
        monkeypatch.setattr("ckptsurgeon.disk.mount.MOUNTS", mounts)
        assert threads(tmp_path) == wanted, kind
    assert threads(tmp_path / "none") == 8
