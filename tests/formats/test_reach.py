"""How far a promise reaches: values of one step, values that a config decides, groups that differ.

Real DeepSpeed engines say what the updates after a surgery use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, report, surgery
from ckptsurgeon.errors import UsageError
from ckptsurgeon.look.expected import expected
from ckptsurgeon.plans.plan import Plan, Receipt
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.report.style import Style
from tests.support.dcp_trainers import olmo, resumed_titan, torchtitan
from tests.support.deepspeed_engine import Options, build, live, make, process_group, resume, train
from tests.support.deepspeed_schedulers import as_planned, options
from tests.support.fairseq_files import make_run

CYCLE: dict[str, Any] = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 8}
LOOK = Style(100)
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with process_group():
        yield


def operate(root: Path, recipe: dict[str, Any]) -> tuple[Plan, Receipt]:
    made = plan(Run.open(root), from_data(recipe))
    return made, surgery.apply(Run.open(root), made)


def one_cycle(**more: Any) -> Options:
    section = {"type": "OneCycle", "params": {**CYCLE, **more}}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    return Options(scheduler_config=section, config=config, optimizer="config")


# --- values of one step --------------------------------------------------------------------------


def test_a_rate_that_lasts_one_step_is_verified_for_that_step_only(tmp_path: Path) -> None:
    """Without the config that the plan names, the engine goes back at the second update."""
    make(tmp_path, options("WarmupDecayLR"))
    made, receipt = operate(tmp_path, {"set": {"lr": 1e-5}})
    assert made.promise is not None and made.promise.lr is not None
    first, second = (rates[0] for rates in resume(tmp_path, options("WarmupDecayLR"), 2)["rates"])
    assert first == pytest.approx(made.promise.lr, rel=1e-12)
    assert second > 10 * first
    head, but, *_ = report.done(receipt, LOOK).splitlines()
    assert head.endswith(f"verified: step 7 uses lr {first:.3e} (for this step only)")
    assert but.startswith("  but      WarmupDecayLR saves only its position: relaunch with ")
    assert set(report.plan_json(made, "deepspeed", receipt)["promise"]["one_step"]) == {"lr"}


def test_a_later_surgery_and_verify_still_say_so(tmp_path: Path) -> None:
    make(tmp_path, options("WarmupDecayLR"))
    operate(tmp_path, {"set": {"lr": 1e-5}})
    later, _ = operate(tmp_path, {"reset": ["moments"]})
    assert later.promise is not None and set(later.promise.one_step) == {"lr"}
    run = Run.open(tmp_path)
    assert set(look.inspect(run).promise.one_step) == {"lr"}
    found = look.verify(run)
    assert found.findings == ()
    for text in (
        report.verification(found, LOOK),
        report.checkpoint(run, run.checkpoint(6), LOOK),
        report.plan(later, "run", LOOK),
    ):
        assert "(for this step only)" in text
    for _ in range(2):
        surgery.apply(run, surgery.plan_undo(run))
    assert look.inspect(run).promise.one_step == {}


def test_a_value_that_stays_is_verified_as_before(tmp_path: Path) -> None:
    make(tmp_path, options("WarmupDecayLR"))
    for recipe in ({"set": {"position": 2}}, {"set": {"weight_decay": 0.2}}):
        made, receipt = operate(tmp_path, recipe)
        assert made.promise is not None and made.promise.one_step == {}
        assert "only" not in report.done(receipt, LOOK)


@pytest.mark.parametrize("cycles", [True, False])
def test_betas_that_onecycle_cycles_are_of_one_step(tmp_path: Path, cycles: bool) -> None:
    """Its default is to cycle: the second update has the scheduler's betas, both of them."""
    options = one_cycle(**({} if cycles else {"cycle_momentum": False}))
    make(tmp_path, options)
    made, receipt = operate(tmp_path, {"set": {"beta1": 0.7, "beta2": 0.9}})
    engine = build(options)
    engine.load_checkpoint(str(tmp_path))
    assert live(engine).param_groups[0]["betas"] == (0.7, 0.9)
    train(engine, 1)
    after = live(engine).param_groups[0]["betas"]
    assert (after == (0.7, 0.9)) is not cycles
    assert made.promise is not None and ("betas" in made.promise.one_step) is cycles
    text = report.done(receipt, LOOK)
    other = replace(receipt, changes=())
    assert "beta" not in report.done(other, LOOK)  # nobody set them: they follow their schedule
    assert ("beta 0.7, 0.9 (for this step only)" in text) is cycles
    assert ("cycle_momentum" in text) is cycles
    if cycles:
        assert not expected(Run.open(tmp_path), 6).steady_betas


# --- what the engine would refuse ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_warmup_of_0_is_refused_where_the_engine_refuses_it(tmp_path: Path, name: str) -> None:
    before = options(name)
    make(tmp_path, before)
    section = dict(before.scheduler_config or {})
    none = replace(
        before, scheduler_config={**section, "params": {**section["params"], "warmup_num_steps": 0}}
    )
    with pytest.raises(ValueError, match="positive integer"):
        build(none)
    with pytest.raises(UsageError, match="at least 1 step") as refused:
        plan(Run.open(tmp_path), from_data({"set": {"lr": 2e-4, "warmup": 0}}))
    assert refused.value.next[0].startswith("ckptsurgeon set warmup=1")
    made, _ = operate(tmp_path, {"set": {"lr": 2e-4, "warmup": 1}})
    assert made.promise is not None
    assert resume(tmp_path, as_planned(made, before), 1)["lr"] == [pytest.approx(made.promise.lr)]


# --- groups that differ --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_groups_with_other_betas_are_promised_each_and_set_each(tmp_path: Path, stage: int) -> None:
    engine = build(Options(stage=stage))
    for group, betas, eps in zip(
        live(engine).param_groups, [(0.9, 0.95), (0.7, 0.7)], [1e-8, 1e-6], strict=True
    ):
        group["betas"], group["eps"] = betas, eps
    train(engine, 2)
    engine.save_checkpoint(str(tmp_path), client_state={"iteration": 2})
    run = Run.open(tmp_path)
    promise = look.inspect(run).promise
    assert promise.groups == (((0.9, 0.95), 1e-8), ((0.7, 0.7), 1e-6))
    text = report.status(run, run.state(2), None, LOOK)
    assert "beta 0.9, 0.95 | 0.7, 0.7 (by group)" in text
    assert "eps 1e-08 | 1e-06 (by group)" in text
    made, _ = operate(tmp_path, {"set": {"beta1": 0.6}})
    held = resume(tmp_path, Options(stage=stage), 1)
    assert held["betas"] == [[0.6, 0.95], [0.6, 0.7]]
    assert made.promise is not None
    assert json.loads(json.dumps(report.plan_json(made, "deepspeed")))["promise"]["groups"] == [
        [[0.6, 0.95], 1e-8],
        [[0.6, 0.7], 1e-6],
    ]


# --- counters of a plain engine ------------------------------------------------------------------


@pytest.mark.parametrize("config", [{"train_batch_size": 2}, {"gradient_accumulation_steps": 1}])
def test_a_skip_by_counters_takes_the_batch_of_the_saved_config(
    tmp_path: Path, config: dict[str, int]
) -> None:
    before = Options(config=config)
    make(tmp_path, before)
    assert "global_batch_size" not in vars(
        torch.load(tmp_path / "global_step6/mp_rank_00_model_states.pt", weights_only=False)["args"]
    )
    made, _ = operate(tmp_path, {"skip": ["7-9"], "skip_by_counters": True})
    assert made.promise is not None and made.promise.consumed_samples == 12 + 3 * 2
    assert resume(tmp_path, before, 1)["consumed_samples"] == 18


# --- values that the trainer decides -------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["olmo-core", "metaseq"])
def test_a_rate_that_only_flags_decide_is_not_verified(tmp_path: Path, trainer: str) -> None:
    """metaseq computes the lr anew from its flags, and OLMo-core from a config that is not here."""
    root = olmo(tmp_path, config=None) if trainer == "olmo-core" else make_run(tmp_path / "run")
    made, receipt = operate(root, {"set": {"beta1": 0.8}})
    assert made.promise is not None and set(made.promise.not_known) == {"lr"}
    step = made.promise.step
    head, but, *_ = report.done(receipt, LOOK).splitlines()
    asked = trainer == "olmo-core"
    known = f"verified on disk: beta 0.8, 0.95; what lr step {step} uses is not known here"
    assert head.endswith(
        known if asked else "written, and read back; whether your trainer takes it is not known"
    )
    assert but == f"  but      {made.promise.not_known['lr']}"
    found = look.verify(Run.open(root))
    text = report.verification(found, LOOK)
    assert but in text.splitlines()
    assert ("lr" in text.splitlines()[1]) is (made.promise.lr is not None)
    assert ("would use" in text) is not asked
    assert ("(as saved; the trainer decides)" in text) is (made.promise.lr is not None)


def test_a_rate_without_saved_base_rates_is_of_one_step(tmp_path: Path) -> None:
    """torchtitan's newer versions take the base rate of every later step from their config."""
    root = torchtitan(tmp_path, old=False)
    made, receipt = operate(root, {"set": {"lr": 5e-4}})
    assert made.promise is not None and set(made.promise.one_step) == {"lr"}
    trainer = resumed_titan(root, old=False, lr=1e-3)
    assert trainer.used()["lr"] == [made.promise.lr] * 2
    trainer.update()
    assert trainer.used()["lr"] == [pytest.approx(1e-3 / 8)] * 2  # 5e-4 / 8 by the new peak
    assert "(for this step only)" in report.done(receipt, LOOK)
    kept, _ = operate(torchtitan(tmp_path / "old", old=True), {"set": {"lr": 5e-4}})
    assert kept.promise is not None and kept.promise.one_step == {}


def test_a_lambda_that_is_moved_keeps_its_rate_for_one_step(tmp_path: Path) -> None:
    before = Options(scheduler="LambdaLR")
    make(tmp_path, before)
    made, receipt = operate(tmp_path, {"set": {"position": 2}})
    assert made.promise is not None
    first, second = (rates[0] for rates in resume(tmp_path, before, 2)["rates"])
    assert first == made.promise.lr and second > first
    assert f"uses lr {first:.3e} (for this step only)" in report.done(receipt, LOOK)
