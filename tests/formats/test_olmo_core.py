"""OLMo-core: its own Trainer and checkpointer write, and resume from what was operated on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.formats.schedules import olmo_core as schedules
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.olmo,
    pytest.mark.filterwarnings("ignore"),  # of the library's own making
]
Maker = Callable[..., Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A run of six steps by what it was started with, trained once."""
    from tests.support.olmo_core import Start, train

    made: dict[str, Path] = {}

    def make(name: str, **start: Any) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("olmo") / "run"
            train(made[name], 6, Start(**start))
        return made[name]

    return make


@pytest.fixture
def run(originals: Maker, tmp_path: Path) -> Maker:
    def copy(name: str, **start: Any) -> Path:
        original = originals(name, **start)
        shutil.copy(original.parent / "data.npy", tmp_path)
        return Path(shutil.copytree(original, tmp_path / "run"))

    return copy


@pytest.mark.witness(
    "OLMo-core",
    "rollback",
    "set betas",
    "set eps",
    "set weight_decay",
    "reset moments",
    by="ai2-olmo-core",
)
def test_with_a_schedule_the_promise_is_the_rate_of_the_next_update(run: Maker) -> None:
    from tests.support.olmo_core import train

    root = run("cosine")
    before = snapshot(root)
    assert look.verify(Run.open(root), level=4).findings == ()
    values = {"beta2": 0.98, "eps": 1e-6, "weight_decay": 0.3}
    plan = operate(root, {"rollback": {"to": 4}, "set": values, "reset": ["moments"]})
    operated = snapshot(root)
    assert plan.promise is not None and plan.promise.step == 5
    used = train(root, 6).used
    assert sorted(used) == [5, 6]
    assert used[5]["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)] * 2
    assert used[6]["lr"][0] < used[5]["lr"][0]
    for update in used.values():
        assert update["betas"] == [(0.9, 0.98)] * 2 and update["eps"] == [1e-6] * 2
        assert sorted(update["weight_decay"]) == [0.0, 0.3]
    assert (used[5]["adam_step"], used[5]["moments"]) == (0, 0)
    assert used[6]["adam_step"] == 1
    shutil.rmtree(root / "step6")
    assert snapshot(root) == operated
    take_back(root, before)


def test_an_lr_that_the_config_decides_is_refused_with_its_key(run: Maker) -> None:
    from tests.support.olmo_core import Start, train

    root = run("cosine")
    with pytest.raises(SurgeryError, match="at every step") as error:
        surgery.plan(Run.open(root), from_data({"set": {"lr": 5e-4}}))
    assert "train_module.optim.lr" in " ".join(error.value.next)
    used = train(root, 7, Start(lr=5e-4)).used[7]
    promise = look.inspect(Run.open(root), 6).promise
    assert promise.lr is not None and used["lr"][0] == pytest.approx(promise.lr / 2)


@pytest.mark.witness(
    "OLMo-core, no scheduler",
    "rollback",
    "set-lr",
    by="ai2-olmo-core",
)
def test_without_a_scheduler_the_lr_of_the_checkpoint_holds(run: Maker) -> None:
    from tests.support.olmo_core import Start, train

    root = run("none", scheduler=None)
    before = snapshot(root)
    plan = operate(root, {"rollback": {"to": 4}, "set": {"lr": 5e-4}})
    assert plan.promise is not None and plan.promise.lr == 5e-4
    used = train(root, 6, Start(scheduler=None, lr=7e-4)).used
    assert [used[step]["lr"] for step in (5, 6)] == [[5e-4] * 2] * 2
    shutil.rmtree(root / "step6")
    take_back(root, before)


def test_without_its_config_neither_is_known(run: Maker) -> None:
    root = run("none", scheduler=None)
    for config in root.glob("step*/config.json"):
        config.unlink()
    found = look.inspect(Run.open(root))
    assert found.promise.lr is None
    assert any("no config.json" in note for note in found.notes)
    with pytest.raises(SurgeryError, match="not known"):
        surgery.plan(Run.open(root), from_data({"set": {"lr": 5e-4}}))
    operate(root, {"set": {"beta2": 0.98}})


@pytest.mark.parametrize("unit", ["steps", "tokens"])
@pytest.mark.parametrize("end", ["steps", "tokens", "epochs"])
def test_the_rate_follows_the_units_of_the_schedule_and_of_the_run(
    run: Maker, unit: str, end: str
) -> None:
    from olmo_core.optim.scheduler import LinearWithWarmup, SchedulerUnits
    from olmo_core.train import Duration

    from tests.support.olmo_core import BATCH, Start, train

    scheduler = LinearWithWarmup(
        warmup=2 if unit == "steps" else 2 * BATCH, units=SchedulerUnits(unit)
    )
    durations = {"steps": 20, "tokens": 20 * BATCH + 5, "epochs": 1}
    start = {"scheduler": scheduler, "end": Duration(durations[end], end)}
    root = run(f"{unit} {end}", **start)
    promise = look.inspect(Run.open(root)).promise
    used = train(root, 7, Start(**start)).used[7]
    assert used["lr"][0] == pytest.approx(promise.lr, rel=1e-12)


def test_each_known_schedule_is_the_librarys_own() -> None:
    from olmo_core.optim import scheduler as real

    stage, late = real.ComposableSchedulerStage, real.OverrideDecay
    examples = [
        real.ConstantScheduler(),
        real.ConstantWithWarmup(warmup=5),
        real.ConstantWithWarmup(warmup_fraction=0.1, warmup_min_lr=1e-5),
        real.WSD(warmup=5),
        real.WSD(warmup_steps=5, decay_steps=7, decay_fraction=None, decay_min_lr=1e-5),
        real.PowerLR(warmup=4),
        real.LinearWithWarmup(warmup=5),
        real.LinearWithWarmup(warmup_fraction=0.2, t_max=40, alpha_f=0),
        real.InvSqrtWithWarmup(warmup=5),
        real.CosWithWarmup(warmup=5),
        real.HalfCosWithWarmup(warmup=5),
        real.CosWithWarmupAndLinearDecay(warmup=5),
        real.CosWithWarmupAndLinearDecay(warmup=5, decay=9, decay_fraction=None),
        real.ComposableScheduler(
            stages=[
                stage(duration=10, start_lr=0.0, end_lr_fraction=1.0),
                stage(duration=20, shape="cosine", end_lr=1e-4),
            ],
            override_decay=late(start=25, duration=10, end_lr=0.0),
        ),
        real.SequentialScheduler(
            schedulers=[
                real.ConstantWithWarmup(warmup=5),
                real.CosWithWarmup(warmup=0),
                real.LinearWithWarmup(warmup=0),
            ],
            schedulers_max=[10, 30],
            override_decay=late(start=35, duration=10, end_lr_fraction=0.01, shape="cosine"),
        ),
        real.WSDS(
            period_lengths=[15, 20, 10],
            warmup=3,
            decay_fraction=0.2,
            period_lr_multipliers=[1.0, 0.5, 0.25],
        ),
        real.WSDS(period_lengths=[15, 20], warmup=3, decay=4),
        real.ExponentialScheduler(),
    ]
    assert {type(example).__name__ for example in examples} == schedules.FORMULAS.keys()
    for example in examples:
        config = example.as_config_dict()
        for now in range(1, 51):
            rate = schedules.rate(config, 1e-3, now, 50)
            assert rate == pytest.approx(float(example.get_lr(1e-3, now, 50)), rel=1e-9, abs=1e-18)
    assert schedules.rate({"_CLASS_": "mine.Own"}, 1e-3, 1, 50) is None


# --- the data ------------------------------------------------------------------------------------


@pytest.mark.witness(
    "OLMo-core",
    "set seed",
    by="ai2-olmo-core",
)
def test_the_seed_of_the_checkpoint_decides_the_order(run: Maker, tmp_path: Path) -> None:
    from tests.support.olmo_core import Start, train

    root = run("cosine")
    before = snapshot(root)
    plan = operate(root, {"set": {"seed": 11}})
    assert plan.promise is not None and (plan.promise.seed, plan.promise.data_batches) == (11, 6)
    fresh = train(tmp_path / "other", 8, Start(seed=11)).batches
    resumed = train(root, 8, Start(seed=7)).batches  # its config says 7, and is not asked
    assert [resumed[step] for step in (7, 8)] == [fresh[step] for step in (7, 8)]
    shutil.rmtree(root / "step8")
    take_back(root, before)


@pytest.mark.witness(
    "OLMo-core",
    "skip --by-counters",
    by="ai2-olmo-core",
)
def test_batches_are_passed_over_by_the_loaders_counters(run: Maker, tmp_path: Path) -> None:
    from tests.support.olmo_core import train

    root = run("cosine")
    before = snapshot(root)
    order = train(tmp_path / "other", 12).batches
    plan = operate(root, {"rollback": {"to": 4}, "skip": ["5-7"], "skip_by_counters": True})
    assert plan.promise is not None
    assert (plan.promise.step, plan.promise.data_batches, plan.promise.data_epoch) == (5, 7, 1)
    resumed = train(root, 6).batches
    assert [resumed[step] for step in (5, 6)] == [order[8], order[9]]
    shutil.rmtree(root / "step6")
    take_back(root, before)
    plan = operate(root, {"set": {"data_batches": 2, "data_epoch": 1}})
    assert plan.promise is not None and plan.promise.data_batches == 2
    assert train(root, 7).batches[7] == order[3]


def test_a_counter_that_moves_no_data_says_so(run: Maker) -> None:
    plan = surgery.plan(Run.open(run("cosine")), from_data({"set": {"iteration": 8}}))
    assert "the data goes on at batch 6 unless data_batches is set too" in plan.warnings


def test_the_flag_for_skips_is_the_trainers_own(run: Maker) -> None:
    from tests.support.olmo_core import Start, train

    root = run("cosine")
    with pytest.raises(SurgeryError) as error:
        surgery.plan(Run.open(root), from_data({"skip": ["7-8"]}))
    assert "--trainer.steps_to_skip='[{start: 7, stop: 9}]'" in error.value.next[0]
    watch = train(root, 10, Start(skip=[(7, 9)]))
    assert sorted(watch.used) == [9, 10] and sorted(watch.batches) == [7, 8, 9, 10]
    assert any("steps_to_skip=['7:9']" in note for note in look.inspect(Run.open(root)).notes)


# --- tiers ---------------------------------------------------------------------------------------


def test_its_own_picker_takes_the_step_that_was_meant(run: Maker) -> None:
    """A folder with `.metadata` right in it holds a model alone, and is taken all the same."""
    from olmo_core.train.checkpoint import Checkpointer

    root = run("cosine")
    shutil.copytree(root / "step6" / "model_and_optim", root / "step9")
    assert Checkpointer.latest_checkpoint(root).endswith("step9")
    with pytest.raises(SurgeryError, match="step 9 is incomplete"):
        Run.open(root).latest()
    operate(root, {"rollback": {"to": 4}})
    assert Checkpointer.latest_checkpoint(root).endswith("step4")


def test_an_ephemeral_step_is_called_one_that_the_trainer_removes(run: Maker) -> None:
    from tests.support.olmo_core import Start, train

    start = {"save_interval": 4, "ephemeral": 3}
    root = run("ephemeral", **start)
    assert Run.open(root).steps() == [3, 4, 6]
    plan = surgery.plan(Run.open(root), from_data({"set": {"eps": 1e-6}}))
    assert any("removes it" in note for note in look.inspect(Run.open(root)).notes)
    assert any("removes it" in line for line in plan.warnings)
    train(root, 10, Start(**start))
    assert Run.open(root).steps() == [4, 8, 9, 10]
