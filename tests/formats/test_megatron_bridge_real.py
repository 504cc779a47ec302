"""Megatron-Bridge: its own loop saves, and resumes what was edited, with what the plan says.

The loop is that of `tests.support.bridge_loop`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ckptsurgeon import look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.launch.flags import launch_flags
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.bridge import needed, start, train
from tests.support.launch import said_by_step
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [pytest.mark.formats, needed]
Maker = Callable[..., Path]
OVERRIDES = "scheduler.override_opt_param_scheduler=true"
NAMED = "checkpoint.dist_ckpt_optim_fully_reshardable=true"
DECAY = "scheduler.lr_decay_iters=16"
KINDS = {
    "WSD": ("scheduler.lr_decay_style=WSD scheduler.lr_wsd_decay_iters=15", DECAY),
    "bf16": ("model.bf16=true model.params_dtype=bf16 optimizer.bf16=true", DECAY),
    "muP": ("model.use_mup=true model.mup_base_hidden_size=4", DECAY),
    "decoupled": (
        "optimizer.decoupled_lr=0.002 optimizer.decoupled_min_lr=0.0002 "
        "model.share_embeddings_and_output_weights=false",
        f"{DECAY} optimizer.decoupled_lr=0.0006",
    ),
    "samples": (
        "train.train_iters=null train.train_samples=160 "
        "scheduler.lr_warmup_iters=0 scheduler.lr_warmup_samples=16",
        "scheduler.lr_decay_samples=128",
    ),
    "max_steps": (
        "scheduler.max_steps=40",
        f"{DECAY} scheduler.use_checkpoint_opt_param_scheduler=true "
        "scheduler.override_opt_param_scheduler=false",
    ),
}
"""Settings of a run → what a plan says to relaunch it with, beside the rate."""
PLACE = "dataset.dataloader_type=external"
"""A loader that saves its own place, as Energon's does."""
RECIPE: dict[str, Any] = {
    "rollback": {"to": 4},
    "set": {
        "lr": 3e-4, "min_lr": 3e-5, "warmup": 24, "decay": 96, "decay_style": "linear",
        "beta2": 0.98, "eps": 1e-6, "weight_decay": 0.3,
    },
}  # fmt: skip


def call(*words: object) -> Result:
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(app, [str(w) for w in words])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A run of six iterations, trained once, by its settings and ranks."""
    made: dict[tuple[object, ...], Path] = {}

    def make(*settings: str, ranks: int = 1) -> Path:
        key = (*settings, ranks)
        if key not in made:
            root = tmp_path_factory.mktemp("bridge") / "run"
            used = train(root, 6, *settings, ranks=ranks)
            (root.parent / "used.json").write_text(json.dumps(used))
            made[key] = root
        return made[key]

    return make


@pytest.fixture
def run(originals: Maker, tmp_path: Path) -> Maker:
    def copy(*settings: str, ranks: int = 1) -> Path:
        original = originals(*settings, ranks=ranks)
        shutil.copy(original.parent / "used.json", tmp_path)
        return Path(shutil.copytree(original, tmp_path / "run"))

    return copy


def keys(plan: Plan) -> list[str]:
    """What the plan says to relaunch with."""
    (text,) = [text for text in plan.warnings if text.startswith("relaunch with")]
    return text.removeprefix("relaunch with ").partition(":")[0].split()


@pytest.mark.witness(
    "Megatron-Bridge",
    "rollback", "set-lr", "set betas", "set eps", "set weight_decay",
    by="megatron-bridge",
)  # fmt: skip
@pytest.mark.parametrize(("settings", "ranks"), [((), 1), ((OVERRIDES,), 1), ((NAMED,), 2)])
def test_the_promise_is_what_the_next_updates_use(
    run: Maker, settings: tuple[str, ...], ranks: int
) -> None:
    root = run(*settings, ranks=ranks)
    before = snapshot(root)
    opened = Run.open(root)
    assert (opened.format.name, opened.steps(), opened.latest()) == (
        "megatron-bridge",
        [2, 4, 6],
        6,
    )
    assert look.verify(opened, level=4).findings == ()
    plan = operate(root, RECIPE)
    promise = plan.promise
    assert promise is not None and promise.step == 5 and promise.asked
    assert keys(plan) == [
        "optimizer.lr=0.0003", "optimizer.min_lr=3e-05", "scheduler.lr_decay_style=linear",
        "scheduler.lr_decay_iters=12", "scheduler.lr_warmup_iters=3",
        "scheduler.start_weight_decay=0.3", "scheduler.end_weight_decay=0.3",
    ]  # fmt: skip
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not list(root.glob("*.distcp"))
    counters = torch.load(root / "latest_train_state.pt", weights_only=True)
    assert counters["step"].item() == 4 and counters["consumed_train_samples"].item() == 32
    twin = shutil.copytree(root, root.with_name("twin"))
    used = train(twin, 6, *settings, *keys(plan), ranks=ranks)
    assert sorted(used) == [5, 6]
    assert used[5]["lr"] == [promise.lr] * 2
    assert tuple(used[5]["weight_decay"]) == promise.weight_decay == (0.3, 0.0)
    assert used[5]["adam_step"] == [promise.adam_step] * 2 == [4, 4]
    assert used[5]["consumed_samples"] == promise.consumed_samples == 32
    assert sorted(used[5]["numbers"]) == list(range(32, 32 + 8 // ranks))
    for update in used.values():
        assert update["betas"] == [[0.9, 0.98]] * 2 and update["eps"] == [1e-6] * 2
        assert update["weight_decay"] == [0.3, 0.0]
    assert used[6]["lr"] == [pytest.approx(3e-4 - 2.7e-4 * (40 - 24) / (96 - 24), rel=1e-12)] * 2
    take_back(root, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_rate_is_used_in_runs_of_each_kind(run: Maker, kind: str) -> None:
    """All groups keep their proportions, and the printed rate is the promised one."""
    settings, said = KINDS[kind][0].split(), KINDS[kind][1].split()
    flags = ["optimizer.lr=0.0003", *said]
    root = run(*settings)
    plan = operate(root, {"rollback": {"to": 4}, "set": {"lr": 3e-4, "decay": 128}})
    assert keys(plan) == flags
    done = start(shutil.copytree(root, root.with_name("twin")), 6, *settings, *flags)
    used = said_by_step(done.stdout)
    assert plan.promise is not None and used[5]["lr"][0] == plan.promise.lr
    first = json.loads((root.parent / "used.json").read_text())["5"]["lr"]
    shares = [lr / used[5]["lr"][0] for lr in used[5]["lr"]]
    assert shares == pytest.approx([lr / first[0] for lr in first])
    (root.parent / "log").write_text(done.stdout)
    assert call("verify", "--log", root.parent / "log", "-C", root).exit_code == 0


def test_a_schedule_that_is_overridden_in_silence_is_caught(run: Maker, tmp_path: Path) -> None:
    root = run(OVERRIDES)
    plan = operate(root, {"rollback": {"to": 4}, "set": {"decay": 96}})
    assert keys(plan) == ["scheduler.lr_decay_iters=12"]
    twin = shutil.copytree(root, tmp_path / "twin")
    (tmp_path / "log").write_text(start(twin, 8, OVERRIDES).stdout)
    caught = call("verify", "--log", tmp_path / "log", "-C", root)
    assert caught.exit_code == 4 and "the config wins" in caught.stdout


def test_a_launch_as_before_the_surgery_is_refused_by_the_trainer(run: Maker) -> None:
    """It finds no param group of the peak that its config has, whether it overrides or not."""
    root = run()
    operate(root, {"set": {"lr": 3e-4}})
    twin = shutil.copytree(root, root.with_name("twin"))
    for settings in ([], [OVERRIDES]):
        assert "KeyError: (None, 0.001, 0.0001" in start(twin, 7, *settings, status=1).stderr
    operate(root, {"set": {"lr": 1e-3, "decay": 96}})
    assert "do not match" in start(root, 7, status=1).stderr


@pytest.mark.parametrize("settings", [(), (OVERRIDES,)])
def test_the_flags_that_are_printed_resume_it(run: Maker, settings: tuple[str, ...]) -> None:
    root = run(*settings)
    promise = operate(root, RECIPE).promise
    assert promise is not None
    used = train(root, 6, *settings, *launch_flags(Run.open(root)))
    assert used[5]["lr"] == [promise.lr] * 2 and used[5]["weight_decay"] == [0.3, 0.0]
    assert used[6]["weight_decay"] == [0.3, 0.0]


@pytest.mark.parametrize("settings", [("model.hidden_dropout=0.0",), (PLACE,)])
def test_a_rollback_alone_is_followed_by_the_same_updates(
    run: Maker, settings: tuple[str, ...]
) -> None:
    """Of rates, moments, weights and samples; and of what is dropped, where the loader keeps its
    own place: torch's draws a random number at each start, on a CPU of the same generator."""
    root = run(*settings)
    first = json.loads((root.parent / "used.json").read_text())
    before = snapshot(root)
    operate(root, {"rollback": {"to": 2}})
    left = ["energon/iter_0000002", "iter_0000002"] if PLACE in settings else ["iter_0000002"]
    assert sorted(str(path.relative_to(root)) for path in root.rglob("iter_*")) == left
    again = train(shutil.copytree(root, root.with_name("twin")), 6, *settings)
    assert again == {int(step): first[step] for step in ("3", "4", "5", "6")}
    take_back(root, before)


def test_the_clean_up_after_a_rollback_keeps_what_it_has_just_saved(run: Maker) -> None:
    """It counts what its loader saved among the steps."""
    root = run(PLACE)
    operate(root, {"rollback": {"to": 2}})
    train(root, 4, PLACE, "checkpoint.most_recent_k=2")
    assert (root / "iter_0000004" / "metadata.json").is_file()
    assert Run.open(root).latest() == 4


@pytest.mark.witness("Megatron-Bridge", "reset moments", by="megatron-bridge")
def test_moments_that_are_reset_are_zero_at_the_next_update(run: Maker) -> None:
    root = run()
    plan = operate(root, {"reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    used = train(root, 8)
    assert (used[7]["adam_step"], used[7]["exp_avg"], used[7]["exp_avg_sq"]) == ([0, 0], 0, 0)
    assert used[7]["lr"] == [plan.promise.lr] * 2 and used[8]["adam_step"] == [1, 1]


@pytest.mark.witness(
    "Megatron-Bridge", "set consumed_samples", "set iteration", by="megatron-bridge"
)
def test_the_counters_decide_where_it_goes_on(run: Maker) -> None:
    root = run()
    plan = operate(root, {"set": {"consumed_samples": 80}})
    assert plan.promise is not None and plan.promise.consumed_samples == 80
    assert train(shutil.copytree(root, root.with_name("twin")), 7)[7]["numbers"] == [*range(80, 88)]
    operate(root, {"set": {"iteration": 5}})
    assert sorted(train(shutil.copytree(root, root.with_name("as is")), 6)) == [6]
    (root / "latest_train_state.pt").unlink()
    assert sorted(train(root, 6, "checkpoint.ckpt_step=6")) == [6]  # as the refusal says


def test_of_a_loader_that_keeps_its_own_place_no_sample_is_set(run: Maker) -> None:
    root = run(PLACE)
    with pytest.raises(SurgeryError, match="what its loader saved in energon"):
        surgery.plan(Run.open(root), from_data({"set": {"consumed_samples": 80}}))


@pytest.mark.witness("Megatron-Bridge", "skip --by-counters", by="megatron-bridge")
def test_what_is_skipped_by_counters_is_counted_as_the_trainer_counts(run: Maker) -> None:
    """This megatron-core ignores a ramp-up."""
    ramp = "train.rampup_batch_size=[4,4,320]"
    root = run(ramp)
    plan = operate(root, {"skip": ["7-8"], "skip_by_counters": True})
    assert plan.promise is not None and plan.promise.consumed_samples == 64
    used = train(root, 8, ramp)
    assert min(used) == plan.promise.step == 7 and used[7]["numbers"] == [*range(64, 72)]


def said(root: Path, recipe: dict[str, Any]) -> list[str]:
    """The keys with which a refused surgery says to relaunch."""
    with pytest.raises(SurgeryError) as refused:
        surgery.plan(Run.open(root), from_data(recipe))
    words = refused.value.next[0].replace(":", " ").replace(",", " ", 0).split()
    return [word.rstrip(",") for word in words if "=" in word]


def test_what_is_refused_is_taken_as_it_is_said(run: Maker) -> None:
    root = run()
    clipped = said(root, {"set": {"clip_grad": 0.25}})
    assert clipped == ["optimizer.clip_grad=0.25"]
    skipping = said(root, {"skip": ["7-8"]})
    assert skipping == ["train.iterations_to_skip=[7,8]"]
    used = train(shutil.copytree(root, root.with_name("twin")), 9, *clipped, *skipping)
    assert sorted(used) == [9] and used[9]["clip_grad"] == 0.25
    assert used[9]["numbers"] == [*range(64, 72)] and used[9]["adam_step"] == [6, 6]
    batch = said(root, {"set": {"batch_size": 16}})
    used = train(shutil.copytree(root, root.with_name("wide")), 8, *batch)
    assert used[7]["numbers"] == [*range(48, 64)]
    assert [used[step]["position"] for step in (7, 8)] == [48, 64]


def test_another_seed_is_taken_as_it_is_said(run: Maker) -> None:
    root = run()
    seeds = said(root, {"set": {"seed": 5}})
    twin = shutil.copytree(root, root.with_name("twin"))
    assert train(twin, 7, seeds[0])[7]["seed"] == 1234  # the saved random numbers
    assert train(root, 7, *seeds)[7]["seed"] == 5


def test_another_optimizer_is_taken_as_it_is_said(run: Maker) -> None:
    root = run()
    fresh = said(root, {"swap_optimizer": {"to": "sgdw"}})
    assert fresh == ["checkpoint.load_optim=false"]
    used = train(root, 8, *fresh)
    assert (used[7]["adam_step"], used[7]["exp_avg"], used[7]["position"]) == ([0, 0], 0, 0)


def test_an_optimizer_that_is_saved_by_name_is_averaged(run: Maker) -> None:
    root = run()
    with pytest.raises(SurgeryError, match="flat buckets") as refused:
        surgery.plan(Run.open(root), from_data({"average": {"last": 2}}))
    assert NAMED in refused.value.next[0]
    train(root, 8, NAMED)
    train(root, 10, NAMED)
    plan = surgery.plan(Run.open(root), from_data({"average": {"last": 2}}))
    surgery.apply(Run.open(root), plan)
    used = train(root, 11, NAMED)
    assert used[11]["adam_step"] == [10, 10]


def test_what_it_prints_and_logs_is_compared_with_the_promise(run: Maker, tmp_path: Path) -> None:
    root = run()
    old, new = tmp_path / "old", tmp_path / "new"
    twin = shutil.copytree(root, tmp_path / "twin")
    for folder in (old, new):
        folder.mkdir()
    plan = operate(root, {"rollback": {"to": 4}, "set": {"lr": 3e-4}})
    (old / "log").write_text(start(twin, 8, f"logger.tensorboard_dir={old / 'tb'}").stdout)
    done = start(root, 8, f"logger.tensorboard_dir={new / 'tb'}", *keys(plan))
    (new / "log").write_text(done.stdout)
    agreed = call("verify", "--log", new / "log", "-C", root, "--json")
    assert agreed.exit_code == 0 and "iteration 5/ 20" in agreed.stdout, agreed.stdout
    words = " ".join(json.loads(agreed.stdout)["word"]["agrees"])
    assert "consumed samples 40" in words and "global batch size 8" in words
    assert call("verify", "--tb", new / "tb", "-C", root).exit_code == 0
    for stale in (["--log", old / "log"], ["--tb", old / "tb"]):
        assert call("verify", *stale, "-C", root).exit_code == 4


@pytest.mark.witness("Megatron-Bridge", "cooldown", "graft moments", "scale", by="megatron-bridge")
def test_a_run_cools_down_from_scaled_weights_and_older_moments(run: Maker) -> None:
    root = run(NAMED)
    before = train(shutil.copytree(root, root.with_name("twin")), 7, NAMED)[7]
    older = json.loads((root.parent / "used.json").read_text())["5"]  # what step 4 saved
    recipe = {"params": "weight", "by": 0.5}
    plan = surgery.plan(Run.open(root), from_data({"scale": recipe}))
    surgery.apply(Run.open(root), plan)
    surgery.apply(Run.open(root), surgery.plan(Run.open(root), from_data({"graft": {"step": 4}})))
    plan = operate(root, {"cooldown": {"steps": 2}})
    assert plan.promise is not None and plan.promise.lr == pytest.approx(before["lr"][0])
    used = train(root, 9, NAMED, *keys(plan))
    assert used[7]["exp_avg_sq"] == older["exp_avg_sq"] != before["exp_avg_sq"]
    assert 0.4 < used[7]["weights"] / before["weights"] < 0.7
    assert [used[step]["lr"][0] for step in (7, 8, 9)] == [
        pytest.approx(plan.promise.lr * share) for share in (1, 0.5, 0)
    ]


def test_how_a_wsd_ends_no_checkpoint_says(run: Maker) -> None:
    with pytest.raises(SurgeryError, match="from its config") as refused:
        surgery.plan(Run.open(run()), from_data({"cooldown": {"steps": 2, "shape": "1-sqrt"}}))
    assert "--shape linear" in str(refused.value.next[0])


def test_a_warm_up_that_was_a_share_is_a_number_from_then_on(run: Maker) -> None:
    share = ("scheduler.lr_warmup_iters=0", "scheduler.lr_warmup_fraction=0.1")
    root = run(*share)
    plan = operate(root, {"set": {"warmup": 64}})
    assert keys(plan) == ["scheduler.lr_warmup_iters=8", "scheduler.lr_warmup_fraction=null"]
    used = train(root, 7, *share, *keys(plan))
    assert plan.promise is not None and used[7]["lr"] == [plan.promise.lr] * 2


def test_a_tuning_goes_on_though_it_saved_that_it_began_as_one(run: Maker) -> None:
    """Its first launch says so in the config, and no later one does."""
    model = run()
    base, root = f"checkpoint.pretrained_checkpoint={model}", model.with_name("tuned")
    train(root, 2, base)
    assert "finetune: true" in (root / "iter_0000002" / "run_config.yaml").read_text()
    plan = operate(root, {"set": {"beta2": 0.98}})
    assert not any("finetune" in text for text in plan.warnings)
    used = train(root, 3, base)
    assert used[3]["adam_step"] == [2, 2] and used[3]["betas"] == [[0.9, 0.98]] * 2


@pytest.mark.witness("Megatron-Bridge", "repair-latest", by="megatron-bridge")
def test_what_a_rollback_and_a_repair_leave_is_what_it_resumes(run: Maker) -> None:
    """Also beside checkpoints that are not persistent, and back to one that is nothing else."""
    kind = (
        "checkpoint.save_interval=4", "checkpoint.non_persistent_save_interval=2",
        "checkpoint.non_persistent_ckpt_type=global",
    )  # fmt: skip
    root = run(*kind)
    assert Run.open(root).latest() == 6 and (root / "non_persistent/iter_0000006").is_dir()
    before = snapshot(root)
    for step in (4, 2):
        operate(root, {"rollback": {"to": step}})
        twin = shutil.copytree(root, root.with_name(f"to{step}"))
        assert sorted(train(twin, step + 1, *kind)) == [step + 1]
        take_back(root, before)
    shutil.rmtree(root / "non_persistent")
    (root / "latest_train_state.pt").write_bytes(b"")
    operate(root, {"repair_latest": {}})
    assert sorted(train(root, 5, *kind)) == [5]
