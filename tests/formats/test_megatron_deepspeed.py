"""BigScience's Megatron-DeepSpeed: a real pipeline writes checkpoints, a relaunch loads them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Plan, Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.megatron_engine import (
    BY_ITERATIONS,
    arguments,
    build,
    make,
    megatron,
    resume,
    save,
)
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back

USE = {"use_checkpoint_lr_scheduler": True}
SCHEDULE = {"lr": 3e-5, "min_lr": 1e-6, "warmup": 6, "decay": 160, "decay_style": "linear"}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with megatron():
        yield


def operate(root: Path, **recipe: Any) -> Plan:
    """Apply, verify every level, and find nothing left to do."""
    made = plan(Run.open(root), from_data(recipe))
    surgery.apply(Run.open(root), made)
    assert look.verify(Run.open(root), level=4).findings == ()
    assert plan(Run.open(root), from_data(dict(made.recipe))).changes == ()
    return made


def rate(made: Plan) -> float:
    assert made.promise is not None and made.promise.lr is not None
    return made.promise.lr


def command_line(warning: str) -> dict[str, Any]:
    """The flags that the plan prints, as the trainer's arguments."""
    words = warning.split()
    pairs = {a: b.rstrip(":") for a, b in itertools.pairwise(words) if a.startswith("--")}
    kinds = {"lr": float, "min_lr": float, "weight_decay": float, "lr_decay_style": str}
    out: dict[str, Any] = {}
    for flag, value in pairs.items():
        name = flag.strip("-:,").replace("-", "_")
        if re.match(r"[\d.]+(e-?\d+)?$|linear$", value):
            out[name] = kinds.get(name, int)(value)
    return out


@pytest.mark.parametrize("changed", [{"lr": 3e-5}, {"min_lr": 5e-5}, SCHEDULE])
@pytest.mark.long
def test_each_way_to_relaunch_that_is_printed_uses_the_new_schedule(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    make(tmp_path)
    made = operate(tmp_path, set=changed)
    (warning,) = made.warnings
    assert "--use-checkpoint-lr-scheduler" in warning
    by_file = resume(tmp_path, **USE)["rates"]
    by_flags = resume(tmp_path, **command_line(warning))["rates"]
    assert by_file == by_flags and by_file[0] == rate(made)
    with pytest.raises(AssertionError):
        resume(tmp_path)


def test_a_run_that_counts_iterations_is_told_its_own_flags(tmp_path: Path) -> None:
    """Its trainer asserts that no flag counts samples; what is no whole iteration has none."""
    make(tmp_path, **BY_ITERATIONS)
    before = snapshot(tmp_path)
    (warning,) = operate(tmp_path, set=SCHEDULE).warnings
    line = {**BY_ITERATIONS, **command_line(warning)}
    assert (line["lr_warmup_iters"], line["lr_decay_iters"]) == (3, 80)
    assert resume(tmp_path, **line) == resume(tmp_path, **BY_ITERATIONS, **USE)
    take_back(tmp_path, before)
    (warning,) = operate(tmp_path, set={"decay": 161}).warnings
    assert "--use-checkpoint-lr-scheduler: else" in warning


def test_a_batch_of_another_size_needs_the_schedule_of_the_file(tmp_path: Path) -> None:
    """Where the command line counts in iterations: they are longer then."""
    make(tmp_path, **BY_ITERATIONS)
    warnings = operate(tmp_path, set={"batch_size": 4}).warnings
    assert "--use-checkpoint-lr-scheduler too" in warnings[-1]
    line = {**BY_ITERATIONS, "global_batch_size": 4}
    with pytest.raises(AssertionError):
        resume(tmp_path, **line)
    assert resume(tmp_path, **line, **USE)["rates"] == resume(tmp_path, **BY_ITERATIONS)["rates"]
    make(tmp_path / "by samples")
    assert "lr-scheduler" not in str(operate(tmp_path / "by samples", set={"batch_size": 4}))


def test_a_hold_is_two_rates_of_zero_in_the_file(tmp_path: Path) -> None:
    """A rate of the command line comes one update late: the groups are loaded with their own."""
    make(tmp_path)
    before = resume(tmp_path)["rates"]
    late = {"lr": 0.0, "min_lr": 0.0, "override_lr_scheduler": True}
    assert resume(tmp_path, **late)["rates"] == [before[0], 0, 0, 0]
    with pytest.raises(SurgeryError, match="no re-warm window") as refused:
        plan(Run.open(tmp_path), from_data({"reset": ["moments"], "rewarm": {"iterations": 2}}))
    reset, zero, launch, back = map(str, refused.value.next)
    assert "reset moments" in reset and "--train-samples 16, which" in launch
    assert "--use-checkpoint-lr-scheduler" in launch and "--train-iters 8" in launch
    operate(tmp_path, reset=["moments"])
    operate(tmp_path, set=rates_of(zero))
    assert resume(tmp_path, **USE)["rates"] == [0, 0, 0, 0]
    operate(tmp_path, set=rates_of(back))
    held = resume(tmp_path)
    assert held["rates"] == before and held["moments"] == 0


def rates_of(hint: str) -> dict[str, float]:
    return {key: float(rate) for key, rate in re.findall(r"((?:min_)?lr)=(\S+)", hint)}


@pytest.mark.parametrize("name", ["load_tag", "reset_iteration"])
def test_flags_that_load_something_else_are_named(tmp_path: Path, name: str) -> None:
    """DeepSpeed's fork takes the step that --load-tag names, whatever a rollback made of latest."""
    make(tmp_path, **{name: "global_step6"})
    (note,) = look.inspect(Run.open(tmp_path)).notes
    assert f"started with --{name.replace('_', '-')}: relaunch without it" in note


def test_a_curriculum_is_among_the_arguments(tmp_path: Path) -> None:
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    schedule = {"total_curriculum_step": 10, "difficulty_step": 8}
    sizes = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}
    held = CurriculumScheduler({**sizes, "schedule_config": schedule})
    make(tmp_path, curriculum_scheduler=held)
    operate(tmp_path, set={"eps": 1e-6})
    assert resume(tmp_path)["eps"] == {1e-6}


def test_flags_say_what_an_earlier_surgery_changed(tmp_path: Path) -> None:
    make(tmp_path)
    operate(tmp_path, set={"lr": 3e-5})
    (warning,) = operate(tmp_path, set={"min_lr": 1e-6}).warnings
    assert resume(tmp_path, **command_line(warning)) == resume(tmp_path, **USE)


def test_the_second_step_is_what_the_promise_leads_to(tmp_path: Path) -> None:
    """The same rates as of a run that had this schedule at this position all along."""
    make(tmp_path / "run")
    operate(tmp_path / "run", set=SCHEDULE)
    names = {"warmup": "lr_warmup_samples", "decay": "lr_decay_samples"}
    born = {names.get(key, key): value for key, value in SCHEDULE.items()}
    born["lr_decay_style"] = born.pop("decay_style")
    make(tmp_path / "born", **born)
    edited = resume(tmp_path / "run", **USE)["rates"]
    assert edited == pytest.approx(resume(tmp_path / "born", **born)["rates"], rel=1e-12)


def test_a_run_that_overrides_the_file_is_told_so(tmp_path: Path) -> None:
    make(tmp_path, override_lr_scheduler=True)
    made = operate(tmp_path, set={"lr": 3e-5})
    assert "started with --override-lr-scheduler" in made.warnings[0]
    first, second, *_ = resume(tmp_path, override_lr_scheduler=True)["rates"]
    assert first == rate(made) and second > first  # the old schedule is back
    kept = resume(tmp_path, override_lr_scheduler=True, **command_line(made.warnings[0]))["rates"]
    assert kept[0] == rate(made) and kept[1] < first


def test_the_rate_of_bnb_experiment_6(tmp_path: Path) -> None:
    """tr8b-104B: from step 12000 with --min-lr 6e-7 --lr-decay-samples 12_695_312. Its log says
    5.999E-05 before and 5.842E-05 at the first step after."""
    line = {"lr": 6e-5, "min_lr": 6e-6, "lr_warmup_samples": 216_320}
    args = arguments(**line, lr_decay_samples=126_953_125)
    engine = build(args)
    engine.lr_scheduler.step(1_519_744)
    save(tmp_path, engine, args)
    run = Run.open(tmp_path)
    before = look.inspect(run, 0).promise
    assert before.lr is not None and f"{before.lr:.5e}" == "5.99859e-05"
    made = plan(run, from_data({"set": {"min_lr": 6e-7, "decay": 12_695_312}}))
    assert f"{rate(made):.5e}" == "5.84153e-05"
    surgery.apply(run, made)
    new = {**line, "min_lr": 6e-7, "lr_decay_samples": 12_695_312}
    assert resume(tmp_path, 1, **new, override_lr_scheduler=True)["rates"] == [rate(made)]


def test_the_position_in_samples(tmp_path: Path) -> None:
    make(tmp_path)
    made = operate(tmp_path, set={"position": 40})
    assert made.warnings == ()  # the loader takes the position from the file in any case
    rates = resume(tmp_path)["rates"]
    make(tmp_path / "long", steps=20)
    assert rates == resume(tmp_path / "long")["rates"] and rates[0] == rate(made)


# --- tokens, older keys --------------------------------------------------------------------------


def test_a_decay_by_tokens_is_computed_by_tokens(tmp_path: Path) -> None:
    make(tmp_path, lr_decay_tokens=400)
    before = resume(tmp_path, lr_decay_tokens=400)["rates"]
    found = look.inspect(Run.open(tmp_path)).promise.lr
    assert found == before[0]
    made = operate(tmp_path, set={"lr": 3e-5, "min_lr": 3e-6})
    after = resume(tmp_path, lr_decay_tokens=400, **USE)["rates"]
    assert after == pytest.approx([rate / 2 for rate in before]) and after[0] == rate(made)


def test_the_end_in_tokens_is_a_flag(tmp_path: Path) -> None:
    make(tmp_path, lr_decay_tokens=400)
    with pytest.raises(SurgeryError, match="token 400") as refused:
        plan(Run.open(tmp_path), from_data({"set": {"decay": 500}}))
    assert "--lr-decay-tokens" in refused.value.next[0]


def test_the_older_names_of_the_keys_win(tmp_path: Path) -> None:
    make(tmp_path)
    older = {
        "max_lr": "start_lr", "warmup_steps": "warmup_iter", "decay_steps": "end_iter",
        "num_steps": "num_iters",
    }  # fmt: skip
    for path in (tmp_path / "global_step6").glob("mp_rank_*"):
        held = torch.load(path, weights_only=False)
        state = held["lr_scheduler"]
        held["lr_scheduler"] = {older.get(key, key): value for key, value in state.items()}
        torch.save(held, path)
    made = operate(tmp_path, set=SCHEDULE)
    rates = resume(tmp_path, **USE)["rates"]
    assert rates[0] == rate(made) and rates == sorted(rates, reverse=True) and rates[0] < 3e-5
    assert look.inspect(Run.open(tmp_path)).schedule == {
        "max_lr": 3e-5, "min_lr": 1e-6, "warmup_steps": 6, "decay_steps": 160, "num_steps": 12,
        "decay_style": "linear", "num_tokens": 48, "warmup_tokens": 0,
    }  # fmt: skip


# --- DeepSpeed's own Megatron-DeepSpeed ----------------------------------------------------------


NEWER = {"newer": True}
KEEP = {**NEWER, "use_checkpoint_opt_param_scheduler": True}


@pytest.mark.parametrize("changed", [{"lr": 3e-5}, SCHEDULE, {"weight_decay": 0.3}])
@pytest.mark.long
def test_a_weight_decay_or_a_schedule_lasts_under_the_newer_scheduler(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """It writes the weight decay of every group after each step, from its own state."""
    make(tmp_path, **NEWER)
    assert resume(tmp_path, **NEWER)["weight_decay"] == (0.1, 0.1, 0.0)
    made = operate(tmp_path, set=changed)
    (warning,) = made.warnings
    assert "--use-checkpoint-opt_param-scheduler" in warning
    assert made.promise is not None and made.promise.weight_decay is not None
    said = command_line(warning)
    for line in (KEEP, {**NEWER, **said}):
        held = resume(tmp_path, **line)
        assert held["rates"][0] == rate(made)
        assert held["weight_decay"] == made.promise.weight_decay == held["later_weight_decay"]
    with pytest.raises(AssertionError):
        resume(tmp_path, **NEWER)


def test_a_weight_decay_that_no_group_takes_is_given_to_them_by_name(tmp_path: Path) -> None:
    """The scheduler has one, and multiplies it by 0 for each group."""
    make(tmp_path, **NEWER, undecayed=True)
    with pytest.raises(SurgeryError, match="every param group has weight decay 0") as refused:
        plan(Run.open(tmp_path), from_data({"set": {"weight_decay": 0.3}}))
    assert "set weight_decay=0.3 --params ." in str(refused.value.next)
    operate(tmp_path, set_params={"params": ".", "weight_decay": 0.3})
    held = resume(tmp_path, **NEWER, undecayed=True)
    assert held["weight_decay"] == held["later_weight_decay"] == pytest.approx((0.3, 0.3, 0.3))


def test_a_weight_decay_of_0_is_no_mark_where_a_multiplier_is_one(tmp_path: Path) -> None:
    """A run without any weight decay: each group's share of one is saved all the same."""
    make(tmp_path, **NEWER, weight_decay=0.0)
    before = snapshot(tmp_path)
    made = operate(tmp_path, set={"weight_decay": 0.3})
    held = resume(tmp_path, **KEEP, weight_decay=0.0)
    assert made.promise is not None and made.promise.weight_decay == (0.3, 0.3, 0.0)
    assert held["weight_decay"] == held["later_weight_decay"] == (0.3, 0.3, 0.0)
    take_back(tmp_path, before)


def test_a_group_keeps_its_share_of_the_schedulers_weight_decay(tmp_path: Path) -> None:
    make(tmp_path, **NEWER)
    operate(tmp_path, set_params={"params": r"^0\.weight", "weight_decay": 0.05})
    operate(tmp_path, set={"weight_decay": 0.3})
    held = resume(tmp_path, **KEEP)
    assert held["weight_decay"] == held["later_weight_decay"] == pytest.approx((0.15, 0.3, 0))


def test_the_newer_schedule_is_as_if_born_with_it(tmp_path: Path) -> None:
    make(tmp_path / "run", **NEWER)
    operate(tmp_path / "run", set=SCHEDULE)
    born = {**NEWER, "lr": 3e-5, "min_lr": 1e-6, "lr_warmup_samples": 6, "lr_decay_samples": 160}
    born["lr_decay_style"] = "linear"
    make(tmp_path / "born", **born)
    edited = resume(tmp_path / "run", **KEEP)["rates"]
    assert edited == pytest.approx(resume(tmp_path / "born", **born)["rates"], rel=1e-12)


def test_a_warm_up_by_tokens(tmp_path: Path) -> None:
    line = {**NEWER, "lr_warmup_tokens": 80}
    make(tmp_path, **line)
    before = resume(tmp_path, **line)["rates"]
    assert look.inspect(Run.open(tmp_path)).promise.lr == before[0]
    with pytest.raises(SurgeryError, match="token 80") as refused:
        plan(Run.open(tmp_path), from_data({"set": {"warmup": 6}}))
    assert "--lr-warmup-tokens" in refused.value.next[0]
    made = operate(tmp_path, set={"lr": 3e-5, "min_lr": 3e-6})
    after = resume(tmp_path, **KEEP, lr_warmup_tokens=80)["rates"]
    assert after == pytest.approx([rate / 2 for rate in before]) and after[0] == rate(made)


def test_a_run_whose_flags_drop_the_optimizer_is_told_so(tmp_path: Path) -> None:
    make(tmp_path, finetune=True)
    assert any("--finetune" in note for note in look.inspect(Run.open(tmp_path)).notes)


# --- the rest ------------------------------------------------------------------------------------


@pytest.mark.witness(
    "Megatron-DeepSpeed",
    "set betas",
    "set eps",
    "set weight_decay",
    "set clip_grad",
    "reset moments",
    by="deepspeed",
)
def test_optimizer_settings_and_the_step_in_the_group(tmp_path: Path) -> None:
    make(tmp_path)
    before, files = resume(tmp_path), snapshot(tmp_path)
    assert before["steps"] == {6}
    wanted = {"beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3, "clip_grad": 0.5}
    made = operate(tmp_path, set=wanted, reset=["moments"])
    after = resume(tmp_path)
    assert made.promise is not None
    assert after["betas"] == {made.promise.betas} == {(0.9, 0.9)}
    assert after["eps"] == {1e-6} and after["clip_grad"] == 0.5
    assert after["weight_decay"] == (0.3, 0.3, 0.0)
    assert after["steps"] == {made.promise.adam_step} == {0} and after["moments"] == 0
    surgery.apply(Run.open(tmp_path), surgery.plan_undo(Run.open(tmp_path)))
    assert snapshot(tmp_path) == files


def test_a_rollback_takes_every_pointer_along(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    operate(tmp_path, rollback={"to": 4})
    assert (tmp_path / "latest").read_text() == "global_step4"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    held = resume(tmp_path)
    assert held["iteration"] == 4 and held["consumed_samples"] == 8


@pytest.mark.parametrize(
    ("recipe", "flag"),
    [
        ({"skip": ["7-8"]}, "--skip-train-iteration-range 7-8"),
        ({"set": {"seed": 43}}, "--seed 43"),
    ],
)
def test_what_the_checkpoint_does_not_decide_is_refused(
    tmp_path: Path, recipe: dict[str, Any], flag: str
) -> None:
    """`args` holds both, and the trainer never reads them back."""
    make(tmp_path)
    with pytest.raises(SurgeryError) as refused:
        plan(Run.open(tmp_path), from_data(recipe))
    assert flag in "\n".join(refused.value.next)
