"""The contract: train, operate, resume, and the trainer's first line equals the plan's promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.launch.relaunch import compare
from ckptsurgeon.recipe.file import from_data, load
from tests.conftest import Trained
from tests.support.launch import REPO, first_line
from tests.support.snapshot import snapshot

# Recipe → what fits it to a run with steps 2, 4, 6, 8, and what the live optimizer must then hold.
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "roll-back-and-lower-lr": (
        ["rollback.to=4", "set.lr=5e-4", "set.warmup=16"],
        {"step": 5, "lr": 5e-4, "adam_step": 4, "consumed_samples": 32},
    ),
    "roll-back-and-skip": (
        ["rollback.to=6", "skip=[7-8]"],
        {"step": 7, "skip": [[7, 8]], "adam_step": 6},
    ),
    "reset-moments": (["rollback.to=4"], {"step": 5, "adam_step": 0, "consumed_samples": 32}),
    "reset-and-hold": (
        ["rollback.to=4", "rewarm.iterations=2"],
        {"step": 5, "lr": 0.0, "adam_step": 0, "rewarm": ["hold", 32, 48]},
    ),
    "reset-here": ([], {"step": 9, "lr": 0.0, "adam_step": 0, "rewarm": ["hold", 64, 864]}),
    "ramp-after-rollback": (
        ["rollback.to=4", "rewarm.iterations=4"],
        {"step": 5, "lr": 0.0, "adam_step": 4, "rewarm": ["ramp", 32, 64]},
    ),
    "lower-beta2": (["rollback.to=4"], {"step": 5, "betas": [0.9, 0.9]}),
    "fake-sgd": (
        ["set.decay_style=constant"],
        {
            "step": 9,
            "betas": [0.0, 0.95],
            "eps": 100.0,
            "lr": 9e-3,
            "weight_decay": [1e-3, 0.0],
        },
    ),
    "real-sgd": (
        ["set.decay_style=constant"],
        {"step": 9, "lr": 0.1, "adam_step": 8, "weight_decay": [1e-4, 0.0]},
    ),
    "lower-clip": ([], {"step": 9, "clip_grad": 0.3}),
    "change-seed": (["rollback.to=4"], {"step": 5, "seed": 43}),
    "cookbook/cooldown-linear": (["cooldown.percent=20"], {"step": 9, "adam_step": 8}),
    "cookbook/cooldown-1-sqrt": (["cooldown.percent=20"], {"step": 9, "adam_step": 8}),
    "cookbook/cpt-rewarm": (
        ["rewarm_schedule.warmup=2", "rewarm_schedule.decay=4"],
        {"step": 9, "lr": 0.0, "adam_step": 8, "consumed_samples": 64},
    ),
    "cookbook/palm-skip": (
        ["rollback.to=4", "skip=[5-6]"],
        {"step": 5, "skip": [[5, 6]], "adam_step": 4},
    ),
    "cookbook/spam-reset": (
        [],
        {"step": 9, "lr": 0.0, "adam_step": 0, "rewarm": ["ramp", 64, 1264]},
    ),
    "cookbook/eps-down": (["set.eps=1e-7"], {"step": 9, "eps": 1e-7}),
    "cookbook/beta2-down": (["set.beta2=0.9"], {"step": 9, "betas": [0.9, 0.9]}),
    "cookbook/palm-batch-size": (
        ["set.batch_size=16"],
        {"step": 9, "adam_step": 8, "consumed_samples": 64},
    ),
    "cookbook/bf16-for-fp16": ([], {"step": 9, "adam_step": 8, "loss_scale": 1.0}),
    "cookbook/fp32-before-the-drift": (
        ["rollback.to=4"],
        {"step": 5, "adam_step": 4, "loss_scale": 1.0},
    ),
    "cookbook/opt-lower": (
        ["rollback.to=4", "set.lr=5e-4"],
        {"step": 5, "clip_grad": 0.3},
    ),
}


def operate_and_resume(root: Path, name: str, ranks: int) -> None:
    overrides, expected = CASES[name]
    before = snapshot(root)
    run = Run.open(root)
    wanted = plan(run, load(REPO / "recipes" / f"{name}.yaml", overrides))
    assert wanted.promise is not None
    surgery.apply(run, wanted)

    line = first_line(root, ranks)
    assert compare(wanted.promise, line) == []
    told = json.loads(line)
    assert {key: told[key] for key in expected} == expected

    again = plan(run, load(REPO / "recipes" / f"{name}.yaml", overrides))
    assert again.changes == ()
    assert again.empty

    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 1) for name in CASES),
        # Of the cookbook, whose sections are those of the other recipes, in `make nightly`.
        *(
            pytest.param(name, 2, marks=[pytest.mark.slow] if "cookbook/" in name else [])
            for name in CASES
        ),
    ],
)
def test_the_trainer_uses_what_the_plan_promised(trained: Trained, name: str, ranks: int) -> None:
    operate_and_resume(trained(ranks=ranks), name, ranks)


@pytest.mark.witness(
    "bundled trainer",
    "rollback", "set-lr", "set betas", "set eps", "set weight_decay", "set clip_grad", "set seed",
    "set consumed_samples", "reset moments", "skip",
    by="deepspeed",
)  # fmt: skip
def test_the_trainer_uses_all_fields_of_one_surgery(trained: Trained) -> None:
    root = trained()
    values = {"lr": 5e-4, "beta1": 0.8, "eps": 1e-6, "weight_decay": 0.3, "clip_grad": 0.5}
    data = {
        "rollback": {"to": 4}, "reset": ["moments"], "skip": ["7-8"],
        "set": {**values, "seed": 7, "consumed_samples": 40},
    }  # fmt: skip
    run = Run.open(root)
    wanted = plan(run, from_data(data))
    assert wanted.promise is not None
    surgery.apply(run, wanted)
    line = first_line(root)
    assert compare(wanted.promise, line) == []
    told = json.loads(line)
    assert (told["step"], told["eps"], told["clip_grad"], told["seed"]) == (5, 1e-6, 0.5, 7)
    assert (told["consumed_samples"], told["skip"], told["adam_step"]) == (40, [[7, 8]], 0)


@pytest.mark.parametrize(
    ("zero", "dtype", "name"),
    [
        (0, "fp32", "roll-back-and-lower-lr"),
        (0, "fp32", "reset-moments"),
        (0, "fp32", "lower-clip"),
        (0, "bf16", "fake-sgd"),
        (1, "bf16", "reset-moments"),
        (1, "bf16", "fake-sgd"),  # of BF16_Optimizer: its gradients are fp32
        (1, "bf16", "lower-clip"),
        (1, "bf16", "roll-back-and-lower-lr"),
        (2, "bf16", "reset-moments"),
    ],
)
def test_the_promise_holds_in_other_stages(
    trained: Trained, zero: int, dtype: str, name: str
) -> None:
    operate_and_resume(trained(zero=zero, dtype=dtype), name, 1)


def test_every_recipe_is_in_the_contract() -> None:
    folder = REPO / "recipes"
    files = [*folder.glob("*.yaml"), *folder.glob("cookbook/*.yaml")]
    names = {path.relative_to(folder).with_suffix("").as_posix() for path in files}
    assert names == set(CASES) | RELATIVE


RELATIVE = {"cookbook/necromancy", "cookbook/pma", "cookbook/qk-clip"}
"""Recipes that are of the state as it is: applied again, they would change it again."""


@pytest.mark.parametrize("name", sorted(RELATIVE))
def test_new_numbers_are_loaded(trained: Trained, name: str) -> None:
    """The trainer starts from them with the promise; undo gives back every byte."""
    root = trained(zero=1, dtype="bf16")
    before = snapshot(root)
    made = plan(Run.open(root), load(REPO / "recipes" / f"{name}.yaml"))
    surgery.apply(Run.open(root), made)
    assert made.promise is not None
    assert compare(made.promise, first_line(root, 1)) == []
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert snapshot(root) == before
