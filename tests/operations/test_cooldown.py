"""After a cooldown the real scheduler objects give the rates of the closed form, at every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.operations.cooldown import Cooldown
from ckptsurgeon.plans.edits import Change
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data, load
from tests.conftest import Trained
from tests.formats.matrix import hugging_face
from tests.support import megatron_engine, megatron_legacy
from tests.support.cooled import (
    CLASSES,
    PEAK,
    STEP,
    D,
    accelerated,
    as_told,
    closed,
    copied,
    loaded,
    same,
    stepped,
)
from tests.support.dcp_trainers import olmo, resumed_titan, torchtitan
from tests.support.deepspeed_engine import make
from tests.support.deepspeed_schedulers import options
from tests.support.fairseq_files import make_run as fairseq
from tests.support.launch import REPO
from tests.support.nanotron_files import make as nanotron
from tests.support.snapshot import snapshot
from tests.support.surgeries import take_back
from train.schedule import AnnealingLR

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES = ("linear", "1-sqrt", "cosine")


def cooled(root: Path, *, half: bool = False, **wanted: Any) -> Plan:
    """The plan, applied; nothing is left to do, nothing is wrong, and it can be taken back. Of one
    whose other `half` is on the command line, that is all that a second plan has to say."""
    run, recipe = Run.open(root), from_data({"cooldown": wanted})
    made = plan(run, recipe)
    surgery.apply(run, made)
    if half:
        assert made.warnings[-1].startswith("relaunch with ")
        assert refused(root, **wanted) in made.warnings[-1].replace("with", "the trainer with", 1)
    else:
        assert plan(Run.open(root), from_data(dict(made.recipe))).empty
    assert look.verify(Run.open(root)).findings == ()
    assert made.before is not None and made.promise is not None
    assert made.promise.lr == pytest.approx(made.before.lr, rel=1e-12)
    return made


def refused(root: Path, **wanted: Any) -> str:
    """What the refusal says to do instead; the run is as it was."""
    before = snapshot(root)
    with pytest.raises(SurgeryError) as error:
        plan(Run.open(root), from_data({"cooldown": wanted}))
    assert snapshot(root) == before
    return " ".join(error.value.next)


# --- torch ---------------------------------------------------------------------------------------

HELD = {
    "LinearLR": ("linear",), "PolynomialLR": ("linear",), "CosineAnnealingLR": ("cosine",),
    "OneCycleLR": ("linear", "cosine"), "OneCycleLR-linear": ("linear", "cosine"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, shapes in HELD.items() for shape in shapes]
)
def test_a_class_of_torch_that_can_hold_it_does(tmp_path: Path, name: str, shape: str) -> None:
    root = accelerated(tmp_path, name)
    before = snapshot(root)
    to = 0.0 if name == "PolynomialLR" else 1e-6
    rates = [column[0] for column in stepped(*loaded(root, CLASSES[name]), 0)]
    cooled(root, steps=D, shape=shape, to=to)
    found = stepped(*loaded(root, CLASSES[name]))
    for rate, column in zip(rates, found, strict=True):
        share = rate / max(rates) if name == "LinearLR" else 1.0
        same(column, closed(rate, to * share, shape))
    take_back(root, before)


def test_a_frozen_first_group_does_not_hide_the_rate_of_the_others(tmp_path: Path) -> None:
    root = accelerated(tmp_path, "LinearLR")
    folder = root / f"checkpoint_{STEP}"
    optimizer = torch.load(folder / "optimizer.bin", weights_only=False)
    scheduler = torch.load(folder / "scheduler.bin", weights_only=False)
    optimizer["param_groups"][0] |= {"lr": 0.0, "initial_lr": 0.0}
    scheduler["base_lrs"][0] = scheduler["_last_lr"][0] = 0.0
    torch.save(optimizer, folder / "optimizer.bin")
    torch.save(scheduler, folder / "scheduler.bin")
    rate = optimizer["param_groups"][1]["lr"]
    cooled(root, steps=D)
    frozen, other = stepped(*loaded(root, CLASSES["LinearLR"]))
    assert frozen == [0.0] * (D + 1)
    same(other, closed(rate, 0.0, "linear"))


def test_a_cooldown_takes_the_batches_that_the_same_recipe_sets(tmp_path: Path) -> None:
    root = megatron_legacy.save(tmp_path / "megatron")
    recipe = {"set": {"batch_size": 2 * megatron_legacy.BATCH}, "cooldown": {"steps": D}}
    made = plan(Run.open(root), from_data(recipe))
    ends = {c.new for c in made.changes if isinstance(c, Change) and c.field == "decay"}
    assert ends == {30 * megatron_legacy.BATCH + D * 2 * megatron_legacy.BATCH}
    surgery.apply(Run.open(root), made)
    assert plan(Run.open(root), from_data(recipe)).empty
    hugging_face(tmp_path / "transformers")
    with pytest.raises(UsageError, match=r"`set\.batch_size` renumbers the steps"):
        plan(
            Run.open(tmp_path / "transformers"),
            from_data({"set": {"batch_size": 4}, "cooldown": {"steps": 2}}),
        )


@pytest.mark.parametrize("name", CLASSES)
def test_the_scheduler_that_a_refusal_names_is_the_cooldown(tmp_path: Path, name: str) -> None:
    """Of a class that can't hold the shape, by torch's own LambdaLR."""
    root = accelerated(tmp_path, name)
    shape = next(shape for shape in reversed(SHAPES) if shape not in HELD.get(name, ()))
    rates = [column[0] for column in stepped(*loaded(root, CLASSES[name]), 0)]
    words = refused(root, steps=D, shape=shape, to=1e-6)
    found = stepped(*as_told(root, words), 3 * D)[0]
    same(found[: D + 1], closed(max(rates), 1e-6, shape))
    assert found[-1] == pytest.approx(1e-6, rel=1e-9)


# --- Megatron's AnnealingLR ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_annealing_lr_decays_from_where_it_stands(
    annealed: Path, tmp_path: Path, shape: str
) -> None:
    root = copied(annealed, tmp_path)
    before = snapshot(root)
    rate = look.inspect(Run.open(root)).promise.lr
    assert rate is not None
    made = cooled(root, steps=D, shape=shape, to=1e-7)
    assert "--use-checkpoint-lr-scheduler" in " ".join(made.warnings)
    with megatron_engine.megatron():
        held = megatron_engine.resume(root, D + 1, use_checkpoint_lr_scheduler=True)
    same(held["rates"], closed(rate, 1e-7, shape))
    take_back(root, before)


def test_the_bundled_trainers_scheduler_decays_alike() -> None:
    """By its own code, from the state that a cooldown leaves."""
    group: dict[str, float] = {"lr": 0.0}

    class Optimizer:
        param_groups = (group,)

    for shape in SHAPES:
        state = {
            "max_lr": PEAK, "min_lr": 1e-5, "decay_style": shape, "warmup_steps": 480,
            "decay_steps": 480 + 8 * D, "num_steps": 480,
        }  # fmt: skip
        scheduler = AnnealingLR(
            Optimizer(), max_lr=1.0, min_lr=0.0, warmup_steps=1, decay_steps=2,
            decay_style="constant",
        )  # fmt: skip
        scheduler.load_state_dict({**state, "warmup_tokens": 0, "num_tokens": 0})
        rates = []
        for _ in range(D + 1):
            rates.append(group["lr"])
            scheduler.step(8)
        same(rates, closed(PEAK, 1e-5, shape))


def test_a_style_that_annealing_lr_lacks_is_refused(annealed: Path) -> None:
    assert "its shapes are cosine, linear" in refused(annealed, steps=D, shape="1-sqrt")


def test_the_recipe_of_the_paper_is_planned(tmp_path: Path) -> None:
    """recipes/cookbook/cooldown-1-sqrt, on a trainer that has the shape: Megatron-LM's WSD."""
    unset = ("lr_wsd_decay_style", "lr_wsd_decay_samples", "lr_wsd_decay_iters")
    root = megatron_legacy.save(tmp_path / "run", **dict.fromkeys(unset))
    made = plan(Run.open(root), load(REPO / "recipes" / "cookbook" / "cooldown-1-sqrt.yaml"))
    assert made.title == "cool down to 0 in 8 steps (1-sqrt)"
    samples = 8 * megatron_legacy.BATCH
    told = f"--lr-wsd-decay-style minus_sqrt --lr-wsd-decay-samples {samples}"
    assert told in " ".join(made.warnings)
    assert made.promise is not None and made.before is not None
    assert made.promise.lr == pytest.approx(made.before.lr, rel=1e-12)


# --- DeepSpeed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupCosineLR"])
def test_the_config_that_deepspeed_needs_is_told(
    tmp_path: Path, name: str, shape: str, alone: None
) -> None:
    from deepspeed.runtime import lr_schedules

    make(tmp_path, options(name), 12)
    words = refused(tmp_path, steps=D, shape=shape, to=1e-6)
    config = json.loads("{" + words.partition("config: ")[2] + "}")
    rate = look.inspect(Run.open(tmp_path)).promise.lr
    assert rate is not None
    base = config.get("optimizer", {"params": {"lr": rate}})["params"]["lr"]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=base)
    section = config["scheduler"]
    scheduler = getattr(lr_schedules, section["type"])(optimizer, **section["params"])
    (saved,) = tmp_path.glob("global_step12/mp_rank_00_model_states.pt")
    scheduler.load_state_dict(torch.load(saved, weights_only=False)["lr_scheduler"])
    optimizer.param_groups[0]["lr"] = rate  # the engine loads the groups, then this scheduler
    same(stepped(optimizer, scheduler)[0], closed(rate, 1e-6, shape))


def test_what_deepspeed_cannot_decay_by_is_refused(tmp_path: Path, alone: None) -> None:
    make(tmp_path, options("WarmupLR"), 6)
    assert "LambdaLR" in refused(tmp_path, steps=2, shape="1-sqrt")


# --- trainers that compute it from their config --------------------------------------------------


def test_torchtitan_gets_the_rate_as_its_base_and_its_options(tmp_path: Path) -> None:
    """Its LambdaLR at the options that the plan names is compared in test_word_libraries."""
    root = torchtitan(tmp_path / "run")
    before = snapshot(root)
    rate = resumed_titan(root).optimizer.param_groups[0]["lr"]
    made = cooled(root, half=True, steps=4, shape="1-sqrt", to=1e-6)
    schedule = resumed_titan(root).schedule
    assert schedule.base_lrs == [rate, rate]
    assert f"--training.steps 10 --lr_scheduler.decay_ratio {4 / 10}" in made.warnings[-1]
    assert "--lr_scheduler.decay_type sqrt" in made.warnings[-1]
    take_back(root, before)


def test_others_are_told_what_to_write(tmp_path: Path) -> None:
    words = refused(olmo(tmp_path / "olmo"), steps=4)
    assert "override_decay='{start: 7, duration: 4, shape: linear, end_lr: 0.0}'" in words
    assert "linear and cosine" in refused(tmp_path / "olmo", steps=4, shape="1-sqrt")
    run = Run.open(nanotron(tmp_path / "nanotron"))
    words = plan(run, from_data({"cooldown": {"steps": 2, "shape": "1-sqrt"}})).warnings[-1]
    assert "lr_decay_style: 1-sqrt, lr_decay_starting_step: 7, lr_decay_steps: 2" in words
    fairseq(tmp_path / "fairseq")
    words = refused(tmp_path / "fairseq", steps=2)
    assert "--lr-scheduler polynomial_decay --power 1 --lr " in words and "zero" not in words
    warmed = {"lr_scheduler": {"zero_lr_warmup_steps": 5}}  # metaseq's, before its warm-up
    fairseq(tmp_path / "metaseq", command_line=warmed)
    assert "--zero-lr-warmup-steps 0" in refused(tmp_path / "metaseq", steps=2)


# --- the section ---------------------------------------------------------------------------------


def test_a_percentage_is_of_the_whole_run(tmp_path: Path) -> None:
    """MiniCPM's 10 %: of 60 steps and those that are added."""
    root = accelerated(tmp_path, "LinearLR")
    made = plan(Run.open(root), from_data({"cooldown": {"percent": 25}}))
    assert made.recipe["cooldown"] == {"steps": 20}
    assert made.title == "cool down to 0 in 20 steps (linear)"


def test_saves_are_not_taken_for_updates(tmp_path: Path) -> None:
    """Accelerate's own names count them: its third save may be of update 60."""
    root = accelerated(tmp_path, "LinearLR")
    folder = (root / f"checkpoint_{STEP}").rename(root / "checkpoint_3")
    adam = torch.load(folder / "optimizer.bin", weights_only=False)
    for group in adam["param_groups"]:
        for number in group["params"]:
            adam["state"][number] = {"step": torch.tensor(60.0)}
    torch.save(adam, folder / "optimizer.bin")
    made = plan(Run.open(root), from_data({"cooldown": {"percent": 25}}))
    assert made.recipe["cooldown"] == {"steps": 20}
    with pytest.raises(UsageError, match="longer than the run before it: 60 steps"):
        plan(Run.open(root), from_data({"cooldown": {"steps": 61}}))


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({}, "either `steps` or `percent`"),
        ({"steps": 4, "percent": 4}, "either `steps` or `percent`"),
        ({"steps": 0}, "`cooldown.steps` is 0"),
        ({"percent": 100}, "a number, above 0 and below 100"),
        ({"steps": 4, "shape": "sqrt"}, "1-sqrt"),
        ({"steps": 4, "to": -1e-9}, "at least 0"),
        ({"steps": 61}, "longer than the run before it: 60 steps"),
        ({"steps": 4, "to": 1e-2}, "can't go down to 0.01"),
    ],
)
def test_a_cooldown_that_cannot_be_meant_is_refused(
    tmp_path: Path, wanted: dict[str, Any], says: str
) -> None:
    root = accelerated(tmp_path, "LinearLR")
    with pytest.raises(UsageError) as error:
        plan(Run.open(root), from_data({"cooldown": wanted}))
    assert says in f"{error.value.what} {error.value.next}"


def test_a_cooldown_that_ends_after_the_run_says_so(trained: Trained) -> None:
    root = trained()
    made = plan(Run.open(root), from_data({"cooldown": {"steps": 4}}))
    end = "the run ends at train_iters 8, and the cooldown at 12"
    assert f"{end}: relaunch with train_iters=12" in made.warnings
    config = root / "train.yaml"
    config.write_text(config.read_text().replace("train_iters: 8\n", "train_iters: 12\n"))
    made = plan(Run.open(root), from_data({"cooldown": {"steps": 4}}))
    assert [warning for warning in made.warnings if "train_iters" in warning] == []


def test_two_words_on_one_schedule_are_refused() -> None:
    with pytest.raises(UsageError, match="both `cooldown` and `set` decide lr"):
        from_data({"cooldown": {"steps": 4}, "set": {"lr": 1e-4}})
    assert from_data({"cooldown": {"steps": 4}, "set": {"beta2": 0.99}}).get(Cooldown)
