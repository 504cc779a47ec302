"""A call of the Python API lists the folder of a run a few times, however many steps are in it, and
a plan compares the files that it relies on as often as there are files."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from ckptsurgeon import Hyperparameters, Recipe, Run, apply, inspect, plan, plan_undo, verify
from tests.hostile.watched import audited
from tests.support.tiny_run import make_run

LISTED = ("os.listdir", "os.scandir")


def listings(root: Path) -> dict[str, int]:
    """How often each call lists the root of the run."""
    count = 0

    def note(event: str, details: tuple[object, ...]) -> None:
        nonlocal count
        count += event in LISTED and str(details[0]) == str(root)

    found = {}
    run = Run.open(root)
    with audited(note):
        planned = plan(run, Recipe(Hyperparameters(lr=3e-4)))
        found["plan"], count = count, 0
        apply(run, planned)
        found["apply"], count = count, 0
        verify(run)
        found["verify"], count = count, 0
        inspect(run)
        found["inspect"], count = count, 0
        plan_undo(run)
        found["plan_undo"] = count
    return found


@pytest.mark.parametrize("steps", [(2, 4), tuple(range(2, 42, 2))])
def test_a_call_lists_the_run_a_few_times(tmp_path: Path, steps: tuple[int, ...]) -> None:
    found = listings(make_run(tmp_path / "run", steps))
    assert all(0 < times <= 15 for times in found.values()), found


@pytest.mark.parametrize("count", [200, 400])
def test_a_plan_looks_at_each_file_once_and_compares_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """What a section reads of another run may be thousands of shards, and some of them twice."""
    others = [tmp_path / f"{i}.pt" for i in range(count)]
    for other in others:
        other.write_bytes(b"")
    monkeypatch.setattr(Hyperparameters, "reads", lambda *_: [*others, *others])
    run = Run.open(make_run(tmp_path / "run"))
    compared, alike = 0, PurePath.__eq__

    def counted(self: PurePath, other: object) -> bool:
        nonlocal compared
        compared += 1
        return alike(self, other)

    monkeypatch.setattr(PurePath, "__eq__", counted)
    planned = plan(run, Recipe(Hyperparameters(lr=3e-4)))
    assert count < len(planned.assumes) < count + 20
    assert compared < 10 * count
