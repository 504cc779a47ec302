"""The timeline of a run by its receipts: what was left, where training went on, what is saved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, plan, plan_undo, surgery
from ckptsurgeon.logs.curves import of_rows
from ckptsurgeon.look.logged import own
from ckptsurgeon.look.timeline import Timeline, timeline_of
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.attic import attics, prune
from tests.conftest import Trained
from tests.support.event_logs import write_log
from tests.support.launch import launch
from tests.support.own_runs import BEGAN, saved


def timeline(root: Path) -> Timeline:
    run = Run.open(root)
    return timeline_of(own(run, {}), run)


def operate(root: Path, **recipe: object) -> None:
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data(recipe)))


def steps(branch: object) -> list[int]:
    return list(np.asarray(branch["loss"].steps))  # type: ignore[index]


def test_a_run_without_surgery_is_one_line(trained: Trained) -> None:
    told = timeline(trained())
    assert steps(told.kept) == [1, 2, 3, 4, 5, 6, 7, 8] and not told.left
    assert told.saved == dict.fromkeys((2, 4, 6, 8), "sound")
    assert told.advice.verdict == "unknown" and told.advice.reason.endswith("has 8")


def test_what_a_rollback_left_and_what_was_trained_again(trained: Trained) -> None:
    root = trained()
    operate(root, rollback={"to": 4}, why="a spike at 7", skip=["7-7"], set={"lr": 5e-4})
    (left,) = timeline(root).left
    assert (left.receipt, left.to, left.why) == ("0001", 4, "a spike at 7")
    assert steps(left.curves) == [5, 6, 7, 8]
    told = timeline(root)
    assert told.saved == {2: "sound", 4: "sound", 6: "in the attic", 8: "in the attic"}
    assert told.skips == ((7, 7),) and steps(told.kept) == [1, 2, 3, 4]

    launch(f"--config={root / 'train.yaml'}", "train_iters=8")
    told = timeline(root)
    assert steps(told.kept) == [1, 2, 3, 4, 5, 6, 8]
    assert set(told.saved.values()) == {"sound"}

    run = Run.open(root)
    surgery.apply(run, plan_undo(run, None))
    told = timeline(root)
    assert steps(told.kept) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(left.receipt, left.to, steps(left.curves)) for left in told.left] == [
        ("0002", 8, [5, 6, 8])
    ]
    assert told.skips == ()


def test_what_a_trainer_trained_again_by_itself() -> None:
    def logged(stop: int) -> list[tuple[int, dict[str, float], float]]:
        return [(step, {"loss": 2.0}, math.nan) for step in range(1, stop + 1)]

    again = [(step, {"loss": 1.0}, math.nan) for step in range(51, 201)]
    (left,) = timeline_of(of_rows([*logged(100), *again], Path("log")), None).left
    assert (left.to, steps(left.curves)[0], steps(left.curves)[-1]) == (50, 51, 100)
    few = [(step, {"loss": 1.0}, math.nan) for step in range(99, 201)]
    assert [
        left.to for left in timeline_of(of_rows([*logged(100), *few], Path("log")), None).left
    ] == [None]


def test_a_pruned_attic_is_named_and_the_cut_branch_still_drawn(trained: Trained) -> None:
    root = trained()
    operate(root, rollback={"to": 4}, tensorboard={"keep_as": "tb-left"})
    run = Run.open(root)
    prune(run, attics(run))
    told = timeline(root)
    assert told.saved == {2: "sound", 4: "sound", 6: "pruned", 8: "pruned"}
    assert [(left.to, steps(left.curves)) for left in told.left] == [(4, [5, 6, 7, 8])]


def test_an_edit_in_place_leaves_nothing(trained: Trained) -> None:
    root = trained()
    operate(root, set={"lr": 5e-4})
    told = timeline(root)
    assert told.edits == ((8, "0001"),) and not told.left


def test_a_damaged_step_is_no_sound_one(trained: Trained) -> None:
    root = trained()
    next((root / "global_step4").glob("*optim_states.pt")).unlink()
    shard = next((root / "global_step6").glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:100])
    told = timeline(root)
    assert told.saved == {2: "sound", 4: "incomplete", 6: "unsound", 8: "sound"}


PAGE = """name: own
log_files: [losses.json]
files:
  "ckpt-{step}.pt": {optimizers: [[optimizer]]FIELDS}
"""


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@example(6, 0, "", False)
@example(1, -1, "metrics.csv", True)
@example(1, 0, "losses.json", False)
@given(
    updates=st.sampled_from([1, 6]),
    offset=st.sampled_from([-1, 0]),
    table=st.sampled_from(["", "metrics.csv", "losses.json"]),
    counter=st.booleans(),
)
def test_a_cut_is_drawn_where_the_log_was_cut(
    tmp_path_factory: pytest.TempPathFactory,
    updates: int,
    offset: int,
    table: str,
    counter: bool,
) -> None:
    """Whatever its numbers count: epochs of so many updates are steps beside a log of updates,
    which a counter ties to them, or the recipe."""
    root, every = tmp_path_factory.mktemp("run") / "run", 12 // updates
    fields = ", fields: {iteration: [[updates]]}" if counter else ""
    saved(root, {every * k: 12 * k for k in range(1, 5)}, PAGE.replace("FIELDS", fields))
    with (root / "ckptsurgeon.yaml").open("a") as file:
        file.write(f"log_offset: {offset}\n")
    numbers = range(1 + offset, 49 + offset)
    if not table:
        write_log(root / "logs", [2.5] * 48, first=numbers[0], tag="train/loss", wall=BEGAN)
    elif table.endswith(".csv"):
        rows = "".join(f"{number},2.5\n" for number in numbers)
        (root / table).write_text(f"step,loss\n{rows}")
    else:
        items = ({"step": number, "loss": 2.5} for number in numbers)
        (root / table).write_text("".join(f"{json.dumps(item)}\n" for item in items))
    cut = {} if counter or updates == 1 else {
        "tensorboard": {"truncate": False}, "logs": {"after": 24 + offset}
    }  # fmt: skip
    operate(root, rollback={"to": 2 * every}, **cut)
    told = timeline(root)
    (left,) = told.left
    assert steps(left.curves) == [n for n in numbers if n > 24 + offset]
    assert left.to == 24 + offset
    assert steps(told.kept) == [n for n in numbers if n <= 24 + offset]
    run = Run.open(root)
    prune(run, attics(run))
    (left,) = timeline(root).left
    assert steps(left.curves) == [n for n in numbers if n > 24 + offset]
