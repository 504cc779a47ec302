"""What the new step can't hold is named, with the flag, the call or the key that sets it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, plan
from ckptsurgeon.operations.transplant import _unlike
from ckptsurgeon.plans.promise import Promise
from ckptsurgeon.recipe.file import from_data
from tests.support.deepspeed_engine import Options, build, client, make, process_group, train
from tests.support.numbered_steps import saved
from tests.support.tiny_run import GROUP

ORDER = ("0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias")
SAID = {
    "no zero": {
        "loss_scale is 256.0 in the source and is 1.0 here: without fp16 there is none",
        "clip_grad is 1.0 in the source and is not kept here: relaunch with "
        '"gradient_clipping": 1.0 in the DeepSpeed config',
        "skip is ((8, 9),) in the source and is not kept here: relaunch BigScience's "
        "Megatron-DeepSpeed with --skip-train-iteration-range 8-9; where an iteration has G "
        "micro-batches, 8-(7 + 2 × G): no checkpoint counts what it skips; of others, skip "
        "the batches in the training script: DeepSpeed's config has no such key",
    },
    "fp16": {
        "skip is ((8, 9),) in the source and is not kept here: relaunch BigScience's "
        "Megatron-DeepSpeed with --skip-train-iteration-range 8-9; where an iteration has G "
        "micro-batches, 8-(7 + 2 × G): no checkpoint counts what it skips; of others, skip "
        "the batches in the training script: DeepSpeed's config has no such key",
    },
    "trainer": {
        "betas is (0.9, 0.95) in the source and is (0.9, 0.999) here: set betas to (0.9, 0.95) "
        "where the trainer is started",
        "weight_decay is (0.1, 0.0) in the source and is (0.1,) here: set weight_decay to "
        "(0.1, 0.0) where the trainer is started",
        "loss_scale is 256.0 in the source and is 1.0 here: without fp16 there is none",
        "clip_grad is 1.0 in the source and is not kept here: relaunch the trainer with "
        "--max_grad_norm 1.0",
        "consumed_samples is 12 in the source and is not kept here: let its data begin with "
        "sample 12",
        "skip is ((8, 9),) in the source and is not kept here: ckptsurgeon skip 8-9 says what can "
        "be done",
        "position is 6 updates: the source counts no position",
    },
}  # fmt: skip
"""Of a run of fp16 in another layout, whose param groups keep their own settings."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unlike")
    with process_group():
        engine = build(Options(stage=2, dtype="fp16"))
        train(engine, 6)
        told = {**client(6), "skip_train_iteration_range": [[8, 9]]}
        engine.save_checkpoint(str(folder / "source"), client_state=told)
        make(folder / "no zero", Options(stage=0), 1)
        make(folder / "fp16", Options(stage=1, dtype="fp16"), 1)
        shapes = {n: tuple(p.shape) for n, p in engine.module.named_parameters()}
    models = [{name: torch.zeros(shapes[name]) for name in ORDER} for _ in range(3)]
    saved(folder / "trainer", 1, models, {})
    saved(folder / "other trainer", 1, models, {})
    path = folder / "other trainer" / "checkpoint-1" / "optimizer.pt"
    adam = torch.load(path)
    adam["param_groups"][0] |= {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3}
    torch.save(adam, path)
    (folder / "order.txt").write_text("\n".join(ORDER))
    return folder


@pytest.mark.parametrize("target", SAID)
def test_what_the_target_can_not_hold_is_named_with_what_sets_it(runs: Path, target: str) -> None:
    section = {
        "source": str(runs / "source"), "order": str(runs / "order.txt"), "settings": "template",
    }  # fmt: skip
    made = plan(Run.open(runs / target), from_data({"transplant": section}))
    assert {str(text) for text in made.warnings} == SAID[target]


def said(source: Path, target: Path, settings: str) -> set[str]:
    order = str(source.parent / "order.txt")
    section = {"source": str(source), "order": order, "settings": settings}
    made = plan(Run.open(target), from_data({"transplant": section}))
    return {str(text).replace(str(source), "") for text in made.warnings}


def with_an_empty_group(runs: Path, name: str, first: bool) -> Iterator[Path]:
    """The run, and where a Trainer saved it, once more with a param group of no parameter."""
    yield runs / name
    if "trainer" not in name:
        return
    run = runs / f"{name}, {first}"
    if not run.exists():
        shutil.copytree(runs / name, run)
        (step,) = run.glob("checkpoint-*")
        adam, schedule = (torch.load(step / f"{each}.pt") for each in ("optimizer", "scheduler"))
        rate, at = 7 * schedule["_last_lr"][0], 0 if first else 1
        empty = {"lr": rate, "initial_lr": rate, "betas": (0.5, 0.6), "eps": 0.5}
        empty |= {"weight_decay": 0.5, "params": []}
        adam["param_groups"].insert(at, {**GROUP, **empty})
        for key, value in (("base_lrs", rate), ("_last_lr", rate), ("lr_lambdas", None)):
            schedule[key].insert(at, value)
        torch.save(adam, step / "optimizer.pt")
        torch.save(schedule, step / "scheduler.pt")
    yield run


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("source", "target", "settings"),
    [
        ("trainer", "fp16", "source"), ("trainer", "fp16", "template"),
        ("source", "trainer", "template"), ("trainer", "other trainer", "source"),
        ("trainer", "other trainer", "template"),
    ],
)  # fmt: skip
def test_a_group_without_parameters_yields_no_advice(
    runs: Path, source: str, target: str, settings: str, first: bool
) -> None:
    """In either run, or in both: the sentences, and the next step, are those without it."""
    known = said(runs / source, runs / target, settings)
    assert any("weight_decay" in text for text in known) == (settings == "template")
    for one in with_an_empty_group(runs, source, first):
        for other in with_an_empty_group(runs, target, first):
            assert said(one, other, settings) == known, (one, other)
        assert promise(one) == promise(runs / source)


def promise(root: Path) -> Promise:
    run = Run.open(root)
    return run.checkpoint(run.latest()).state().promise


@pytest.mark.parametrize("target", SAID)
def test_of_ranges_that_nothing_skips_nothing_is_said(runs: Path, target: str) -> None:
    run = Run.open(runs / target)
    made = replace(run.checkpoint(run.latest()).state().promise, skip=None)
    nothing = list(_unlike(run, replace(made, skip=()), made))
    ranges = list(_unlike(run, replace(made, skip=((8, 9),)), made))
    assert not nothing
    assert [text.split(" is ")[0] for text in ranges] == ["skip"]
