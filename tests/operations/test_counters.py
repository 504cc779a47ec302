"""Counters are set in every shard, and a skip by counters moves the data by what would be used."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ckptsurgeon import Hyperparameters, Recipe, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats.schedules.rampup import batch_size
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.launch import first_line
from tests.support.snapshot import snapshot


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_goes_on_from_the_counters_that_were_set(trained: Trained, ranks: int) -> None:
    root = trained(ranks=ranks)
    before = snapshot(root)
    run = Run.open(root)
    recipe = from_data({"set": {"consumed_samples": 400, "tokens": 99, "iteration": 0}})
    wanted = plan(run, recipe)
    assert wanted.promise is not None
    surgery.apply(run, wanted)
    told = json.loads(first_line(root, ranks))
    assert (told["step"], told["consumed_samples"]) == (1, 400)
    assert told["lr"] == pytest.approx(wanted.promise.lr, rel=1e-12)
    assert look.inspect(run).tokens == 99
    assert look.verify(run).findings == ()
    assert plan(run, recipe).empty
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before


def test_a_skip_by_counters_is_done_once(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    recipe = from_data({"skip": ["9-12"], "skip_by_counters": True})
    wanted = plan(run, recipe)
    surgery.apply(run, wanted)
    told = json.loads(first_line(root))
    assert (told["step"], told["consumed_samples"]) == (9, 64 + 4 * 8)
    assert plan(run, recipe).empty
    assert not plan(run, from_data({"skip": ["9-13"], "skip_by_counters": True})).empty


def test_a_skip_by_counters_begins_at_the_next_iteration(trained: Trained) -> None:
    run = Run.open(trained())
    for text in ("10-12", "1-8"):
        with pytest.raises(UsageError, match="does not begin at the next iteration, 9"):
            plan(run, from_data({"skip": [text], "skip_by_counters": True}))


def test_a_skip_without_a_range_or_beside_a_set_counter_is_refused(trained: Trained) -> None:
    with pytest.raises(UsageError, match="needs a range"):
        from_data({"skip_by_counters": True})
    run = Run.open(trained())
    both = {"skip": ["9"], "skip_by_counters": True, "set": {"consumed_samples": 1}}
    with pytest.raises(UsageError, match="both skip_by_counters and"):
        plan(run, from_data(both))


def test_counters_that_a_run_does_not_keep_are_refused(trained: Trained) -> None:
    run = Run.open(trained())
    checkpoint = run.checkpoint(8)
    for tree_ in checkpoint.trees.values():  # type: ignore[attr-defined]
        tree_.pop("tokens", None)
        if "args" in tree_:
            del tree_["args"].state["consumed_train_tokens"]
    assert checkpoint.locate("tokens") == []
    recipe = Recipe(Hyperparameters(tokens=1))
    with pytest.raises(SurgeryError, match="keeps no tokens"):
        recipe[Hyperparameters].changes(run, recipe, checkpoint)


def test_the_ramp_up_is_that_of_the_104b_run(trained: Trained) -> None:
    """`--rampup-batch-size 16 16 6_000_000 --global-batch-size 2048`; consumed samples at 13,251,
    14,000 and 16,800 as in BigScience's tr8b chronicle."""
    state = look.inspect(Run.open(trained()))
    state = dataclasses.replace(state, batch_size=2048, rampup=(16, 16, 6_000_000))
    at, seen = 0, {}
    for iteration in range(1, 16_801):
        at += batch_size(state, at)
        seen[iteration] = at
    assert [seen[i] for i in (13_251, 14_000, 16_800)] == [2_333_840, 3_014_320, 7_594_208]


def test_a_skip_is_seen_from_the_iteration_that_is_set(trained: Trained) -> None:
    run = Run.open(trained())
    recipe = {"set": {"iteration": 99}, "skip": ["7-8", "8-9", "101"]}
    with pytest.raises(UsageError, match="iterations 7-9 are past: the run stands at 99") as caught:
        plan(run, from_data(recipe))
    assert caught.value.next[0].startswith("ckptsurgeon rollback --to 6 --skip 7-9 ")
    recipe["skip"] = ["98-101"]
    told = plan(run, from_data(recipe)).warnings
    assert "iterations 98-99 are past: of skip 98-101 only 100-101 will be skipped" in told


def test_a_position_before_the_start_is_refused(trained: Trained) -> None:
    with pytest.raises(UsageError, match="position -5 is below 0"):
        plan(Run.open(trained()), from_data({"set": {"position": -5}}))


def test_events_are_cut_once(trained: Trained) -> None:
    """The note about the cut lies before it, so the same cut does not find it."""
    run = Run.open(trained())
    recipe = from_data({"tensorboard": {"after": 4, "keep": False}})
    surgery.apply(run, plan(run, recipe))
    assert plan(run, recipe).empty
