"""Megatron-LM's legacy layout: many ranks, chained optimizers, old names, traps of the tracker."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.formats import Disagreement
from ckptsurgeon.formats.megatron import arguments
from ckptsurgeon.formats.schedules import megatron
from ckptsurgeon.launch.flags import launch_flags
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support import newest_megatron
from tests.support.megatron_legacy import SCHEDULE, cosine, megatron_enums, save
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

TRACKER = "latest_checkpointed_iteration.txt"


def loaded(root: Path, step: int) -> list[tuple[dict[str, Any], Any]]:
    """Each rank's two files, as torch loads them where Megatron-LM is importable."""
    with megatron_enums():
        return [
            (
                torch.load(rank / "model_optim_rng.pt", weights_only=False),
                torch.load(rank / "distrib_optim.pt", weights_only=False),
            )
            for rank in sorted((root / f"iter_{step:07d}").iterdir())
        ]


def warned(root: Path, recipe: dict[str, Any]) -> str:
    return "\n".join(surgery.plan(Run.open(root), from_data(recipe)).warnings)


@pytest.mark.parametrize(("chained", "old"), [(1, False), (2, False), (1, True)])
def test_every_rank_gets_what_was_set(tmp_path: Path, chained: int, old: bool) -> None:
    root = save(tmp_path, chained=chained, old=old)
    before = snapshot(root)
    recipe = {
        "rollback": {"to": 20},
        "set": {"lr": 3e-5, "beta2": 0.99, "weight_decay": 0.05, "loss_scale": 1024},
        "reset": ["moments"],
    }
    promise = operate(root, recipe).promise
    assert promise is not None and promise.adam_step == 0 and promise.loss_scale == 1024
    assert (root / TRACKER).read_text() == "20" and not (root / "iter_0000030").exists()
    ranks = loaded(root, 20)
    assert len(ranks) == 4
    for state, moments in ranks:
        schedule = state["lr_scheduler" if old else "opt_param_scheduler"]
        assert schedule["start_lr" if old else "max_lr"] == 3e-5
        assert (schedule["start_wd"], schedule["end_wd"]) == (0.05, 0.05)
        optimizers = state["optimizer"] if chained > 1 else [state["optimizer"]]
        assert len(optimizers) == chained
        for optimizer in optimizers:
            for group in optimizer["optimizer"]["param_groups"]:
                assert group["betas"] == (0.9, 0.99) and group["step"] == 0
                assert group["lr"] == promise.lr
                assert old or group["max_lr"] == 3e-5
            assert float(optimizer["grad_scaler"]["scale"]) == 1024
        for buffers in moments if chained > 1 else [moments]:
            bucket = buffers[0][torch.bfloat16, torch.float32]
            assert not bucket["exp_avg"].any() and not bucket["exp_avg_sq"].any()
            assert bucket["param"].all() and bucket["numel_unpadded"] == 250
        assert state["args"].lr == 6e-5
    take_back(root, before)


def test_the_plan_names_the_flags_that_must_follow(tmp_path: Path) -> None:
    root = save(tmp_path)
    assert "relaunch with" not in warned(root, {"set": {"eps": 1e-6}})
    told = warned(root, {"set": {"lr": 3e-5, "min_lr": 3e-6, "weight_decay": 0.05, "warmup": 320}})
    assert "--lr 3e-05 --min-lr 3e-06 --lr-warmup-samples 320 --weight-decay 0.05:" in told
    assert "--use-checkpoint-opt_param-scheduler" in told
    assert "resuming with --ckpt-step would pair weights" in told


IN_ITERATIONS = {
    "lr_warmup_samples": 0, "lr_decay_samples": None, "train_samples": None, "train_iters": 1000,
    "lr_decay_iters": 1000, "lr_warmup_iters": 10, "lr_warmup_fraction": None,
}  # fmt: skip
IN_FRACTIONS = {**IN_ITERATIONS, "lr_warmup_iters": 0, "lr_warmup_fraction": 0.01}
NO_WARMUP = {"lr_warmup_samples": 0, "train_samples": 16_000, "train_iters": 1000}


@pytest.mark.parametrize(
    ("line", "wanted", "flags"),
    [
        (IN_ITERATIONS, {"decay": 8000}, "--lr-decay-iters 500:"),
        (
            IN_ITERATIONS,
            {"warmup": 320, "decay": 8000},
            "--lr-decay-iters 500 --lr-warmup-iters 20:",
        ),
        (IN_ITERATIONS, {"warmup": 321}, "relaunch with --use-checkpoint-opt_param-scheduler:"),
        (IN_FRACTIONS, {"warmup": 320}, "--lr-warmup-iters 20 (in place of --lr-warmup-fraction):"),
        (IN_FRACTIONS, {"decay": 8000}, "--lr-decay-iters 500 --lr-warmup-iters 10 (in place of"),
        (NO_WARMUP, {"warmup": 320}, "--lr-warmup-samples 320:"),
    ],
)
def test_a_step_count_is_told_in_the_runs_own_unit(
    tmp_path: Path, line: dict[str, Any], wanted: dict[str, Any], flags: str
) -> None:
    """Each is what Megatron-LM multiplies: a warm-up of 0 or as a fraction counts as well."""
    assert flags in warned(save(tmp_path, **line), {"set": wanted})


def test_a_run_in_fractions_is_told_nothing_when_the_schedule_stays(tmp_path: Path) -> None:
    assert "relaunch" not in warned(save(tmp_path, **IN_FRACTIONS), {"set": {"eps": 1e-6}})


@pytest.mark.parametrize("name", ["finetune", "no_load_optim"])
def test_a_flag_that_drops_the_optimizer_is_told(tmp_path: Path, name: str) -> None:
    root = save(tmp_path, **{name: True})
    assert f"--{name.replace('_', '-')}: relaunch without it" in warned(
        root, {"set": {"eps": 1e-6}}
    )


def test_what_the_checkpoint_does_not_decide_is_refused_with_the_flag(tmp_path: Path) -> None:
    root = save(tmp_path)
    for recipe, flag in (
        ({"set": {"clip_grad": 0.3}}, "--clip-grad 0.3"),
        ({"set": {"seed": 7}}, "--seed 7"),
        ({"skip": ["31-33"]}, "--iterations-to-skip 31 32 33"),
    ):
        with pytest.raises(SurgeryError) as error:
            surgery.plan(Run.open(root), from_data(recipe))
        assert any(flag in line for line in error.value.next)
    with pytest.raises(UsageError, match="below min_lr"):
        surgery.plan(Run.open(root), from_data({"set": {"lr": 1e-6}}))


def test_a_rewarm_names_no_flag_that_megatron_lm_lacks(tmp_path: Path) -> None:
    """It has no --override-lr-scheduler, and under --lr 0 finds none of the groups again."""
    recipe = {"reset": ["moments"], "rewarm": {"iterations": 5}}
    with pytest.raises(SurgeryError, match="keeps no re-warm window") as error:
        surgery.plan(Run.open(save(tmp_path)), from_data(recipe))
    assert "--" not in " ".join(error.value.next) and "set-lr" in " ".join(error.value.next)


def test_the_schedule_moves_to_another_position(tmp_path: Path) -> None:
    root = save(tmp_path)
    promise = operate(root, {"set": {"position": 8000}}).promise
    assert promise is not None and promise.lr == pytest.approx(cosine(SCHEDULE, 8000), rel=1e-12)
    for state, _ in loaded(root, 30):
        assert state["opt_param_scheduler"]["num_steps"] == 8000
        assert state["optimizer"]["optimizer"]["param_groups"][0]["lr"] == promise.lr


def test_data_is_skipped_by_counters(tmp_path: Path) -> None:
    root = save(tmp_path)
    promise = operate(root, {"skip": ["31-40"], "skip_by_counters": True}).promise
    assert promise is not None and promise.consumed_samples == 40 * 16
    assert {state["args"].consumed_train_samples for state, _ in loaded(root, 30)} == {640}


BY_COUNTERS: dict[str, Any] = {"skip": ["31-40"], "skip_by_counters": True}


@pytest.mark.parametrize(
    ("line", "samples"),
    [
        ({"step_batch_size_schedule": "0:8 500:16"}, 480 + 3 * 8 + 7 * 16),
        ({"step_batch_size_schedule": "0:8 1K:16", "seq_length": 2}, 480 + 3 * 8 + 7 * 16),
        ({"step_batch_size_schedule": None, "rampup_batch_size": [4, 4, 8000]}, 640),
        ({"rampup_batch_size": [4, 4, 8000]}, 480 + 10 * 4),
    ],
)
def test_batches_are_counted_by_the_schedule_of_their_sizes(
    tmp_path: Path, line: dict[str, Any], samples: int
) -> None:
    """A version that has the newer schedule ignores --rampup-batch-size."""
    promise = operate(save(tmp_path, **line), BY_COUNTERS).promise
    assert promise is not None and promise.consumed_samples == samples


def test_a_schedule_of_sizes_that_can_not_be_read_is_not_counted(tmp_path: Path) -> None:
    root = save(tmp_path, step_batch_size_schedule="0:8 twice:16")
    with pytest.raises(SurgeryError, match="no batch size"):
        surgery.plan(Run.open(root), from_data(BY_COUNTERS))


@pytest.mark.formats
@pytest.mark.parametrize("length", [None, 512])
@pytest.mark.parametrize("text", ["0:768 250M:1536 .5B:3072", "0:8,1K:16", "0:4K 7K:2K"])
def test_the_sizes_are_megatrons(text: str, length: int | None) -> None:
    path = newest_megatron.FOLDER / "megatron" / "core" / "num_microbatches_calculator.py"
    if not path.is_file():
        pytest.skip("make test-formats installs the newest megatron-core")
    spec = importlib.util.spec_from_file_location("calculator", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = module.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, length)
    ours = arguments.sizes({"step_batch_size_schedule": text, "seq_length": length})
    assert list(ours) == theirs.schedule and len(ours) > 1


@pytest.mark.parametrize("recipe", [BY_COUNTERS, {"set": {"consumed_samples": 640}}])
def test_data_that_is_not_positioned_by_samples_is_not_moved_by_them(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    root = save(tmp_path / "energon", dataloader_save="/data/loader")
    with pytest.raises(SurgeryError, match=r"saved in /data/loader \(--dataloader-save\)"):
        surgery.plan(Run.open(root), from_data(recipe))
    root = save(tmp_path / "rerun", rerun=30)
    with pytest.raises(SurgeryError, match="iteration 30 is to be run again"):
        surgery.plan(Run.open(root), from_data(recipe))
    assert "--rerun-mode disabled" in warned(root, {"set": {"eps": 1e-6}})
    assert "rerun" not in warned(save(tmp_path / "at rest", rerun=0), {"set": {"eps": 1e-6}})


def test_samples_that_were_passed_over_and_the_weight_decays_length_are_told(
    tmp_path: Path,
) -> None:
    root = save(tmp_path, skipped_train_samples=320, train_samples=20_000, lr_decay_samples=16_000)
    told = warned(root, {"set": {"eps": 1e-6}})
    assert "320 samples were skipped" in told
    assert "relaunch with --use-checkpoint-opt_param-scheduler:" in told


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (IN_ITERATIONS, "--lr-warmup-iters 10 --lr-decay-iters 1000"),
        (IN_FRACTIONS, "--lr-decay-iters 1000"),
        ({}, "--lr-warmup-samples 160 --lr-decay-samples 16000"),
    ],
)
def test_the_flags_of_a_relaunch_are_in_the_runs_own_unit(
    tmp_path: Path, line: dict[str, Any], flags: str
) -> None:
    """The trainer asserts 'expected iteration-based learning rate decay'."""
    printed = " ".join(launch_flags(Run.open(save(tmp_path, **line))))
    assert flags in printed and printed.count("--lr-warmup") == flags.count("--lr-warmup")
    assert ("-samples" in printed) == ("-samples" in flags)


def test_the_loss_scale_goes_back_to_the_saved_flags(tmp_path: Path) -> None:
    root = save(tmp_path)
    operate(root, {"set": {"loss_scale": 4}})
    operate(root, {"reset": ["loss_scale"]})
    for state, _ in loaded(root, 30):
        scaler = state["optimizer"]["grad_scaler"]
        assert float(scaler["scale"]) == 2**16
        assert (scaler["growth_tracker"], scaler["hysteresis_tracker"]) == (0, 2)


def test_missing_ranks_and_contradictions_are_told(tmp_path: Path) -> None:
    root = save(tmp_path)
    run = Run.open(root)
    rank = root / "iter_0000030" / "mp_rank_01_001"
    with megatron_enums():
        state = torch.load(rank / "model_optim_rng.pt", weights_only=False)
        state["optimizer"]["optimizer"]["param_groups"][0]["betas"] = (0.9, 0.999)
        torch.save(state, rank / "model_optim_rng.pt")
    findings = look.verify(run).findings
    assert any("disagree on betas" in text and "mp_rank_01_001" in text for text in findings)
    with pytest.raises(Disagreement):
        look.inspect(run)
    (rank / "distrib_optim.pt").unlink()
    assert not run.complete(30)
    assert any("mp_rank_01_001/distrib_optim.pt" in t for t in look.verify(run).findings)
    plan = surgery.plan(Run.open(root), from_data({"repair_latest": {}}))
    surgery.apply(Run.open(root), plan)
    assert (root / TRACKER).read_text() == "20"


def test_a_checkpoint_that_is_not_persistent_is_loaded_when_newer(tmp_path: Path) -> None:
    root = save(tmp_path)
    other = root / "non_persistent"
    kind = {"non_persistent_ckpt_type": "global"}
    made = save(tmp_path / "other", (40,), **kind)
    shutil.copytree(made / "iter_0000040", other / "iter_0000040")
    shutil.rmtree(tmp_path / "other")
    (other / TRACKER).write_text("40")
    before = snapshot(root)
    assert Run.open(root).latest() == 40
    operate(root, {"set": {"eps": 1e-6}})
    take_back(root, before)
    operate(root, {"rollback": {"to": 30}})
    assert not (other / TRACKER).exists() and not (other / "iter_0000040").exists()
    assert Run.open(root).latest() == 30
    take_back(root, before)


def test_a_schedule_that_is_not_all_saved_asks_for_the_rest(tmp_path: Path) -> None:
    state = {**SCHEDULE, "lr_decay_style": "WSD", "num_steps": 15_000}
    with pytest.raises(SurgeryError, match="nothing saved says how long"):
        megatron.learning_rate(state, {}, {})
    known = {"wsd_decay_steps": 2000, "lr_wsd_decay_style": "linear"}
    assert megatron.learning_rate(state, {}, known) == pytest.approx(3.3e-5)
    with pytest.raises(SurgeryError, match="no decay style 'spiral'"):
        megatron.learning_rate({**state, "lr_decay_style": "spiral"}, {}, {})


def test_the_schedule_of_bnb_experiment_6() -> None:
    """tr8b-104B chronicles: 5.999E-05 was printed with the old values, 5.842E-05 with the new."""
    state = {
        "max_lr": 6e-5, "min_lr": 6e-6, "lr_warmup_steps": 216_320, "num_steps": 1_519_744,
        "lr_decay_steps": 126_953_125, "lr_decay_style": "cosine",
    }  # fmt: skip
    assert f"{megatron.learning_rate(state, {}, {}):.3E}" == "5.999E-05"
    state |= {"lr_decay_steps": 12_695_312, "min_lr": 6e-7}
    assert f"{megatron.learning_rate(state, {}, {}):.5E}" == "5.84153E-05"


@pytest.mark.parametrize("width", [2, 3, 4, 7.5, 16])
def test_all_groups_keep_their_proportions(tmp_path: Path, width: float) -> None:
    """µP: the trainer makes the rate of a hidden group as below, and finds it by the very float."""
    hidden = 1.0 / width
    root = save(tmp_path, tensor=1, pipeline=1, peaks=(6e-5, 6e-5, 6e-5 * hidden), use_mup=True)
    for lr in (3e-5, 7.3e-5, 1.1e-4):
        operate(root, {"set": {"lr": lr}})
        ((state, _),) = loaded(root, 30)
        groups = state["optimizer"]["optimizer"]["param_groups"]
        assert [group["max_lr"] for group in groups] == [lr, lr, lr * hidden]
        assert groups[2]["lr"] == pytest.approx(groups[0]["lr"] * hidden, rel=1e-12)


def test_the_rate_of_the_embedding_has_a_flag_of_its_own(tmp_path: Path) -> None:
    root = save(tmp_path, tensor=1, pipeline=1, peaks=(6e-5, 6e-5, 2.4e-4), decoupled_lr=2.4e-4)
    text = warned(root, {"set": {"lr": 3e-5}})
    assert "--lr 3e-05 --decoupled-lr 0.00012" in text
    assert "--decoupled-lr" not in warned(root, {"set": {"beta2": 0.99}})


def test_an_eps_of_mup_keeps_its_proportion(tmp_path: Path) -> None:
    hidden = {"max_lr": 6e-5 * (1 / 3), "min_lr": 6e-6 * (1 / 3), "eps": 1e-8 * (1 / 3)}
    root = save(tmp_path, tensor=1, pipeline=1, peaks=(6e-5, 6e-5, 2e-5), third=hidden)
    operate(root, {"set": {"eps": 2e-8}})
    ((state, _),) = loaded(root, 30)
    eps = [group["eps"] for group in state["optimizer"]["optimizer"]["param_groups"]]
    assert eps == [2e-8, 2e-8, 2e-8 * (1 / 3)]


def test_two_groups_that_would_become_one_are_refused(tmp_path: Path) -> None:
    """Of a third group only its own weight decay is different, and `set` makes it the same."""
    root = save(
        tmp_path, tensor=1, pipeline=1, peaks=(6e-5,) * 3, third={"start_wd": 0.2, "end_wd": 0.2},
        first={"start_wd": 0.1, "end_wd": 0.1},
    )  # fmt: skip
    with pytest.raises(SurgeryError, match=r"groups 0 and 2 .* same start_wd, end_wd, by which"):
        surgery.plan(Run.open(root), from_data({"set": {"weight_decay": 0.05}}))
    operate(root, {"set": {"lr": 3e-5}})


def test_groups_that_the_trainer_mixes_up_are_told(tmp_path: Path) -> None:
    """Decoupled rates beside µP: eps is not among the keys by which a group is found."""
    root = save(tmp_path, tensor=1, pipeline=1, peaks=(6e-5,) * 3, third={"eps": 1e-9})
    assert "param groups 0 and 2 differ in eps alone" in warned(root, {"set": {"beta2": 0.99}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_each_rank_of_a_layer_wise_optimizer_has_its_file(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """`LayerWiseDistributedOptimizer` saves whole parameters: those of each data rank in a file.
    Transformer Engine's moments of 8 and 16 bits have no scale there, and 0 is 0 in each."""
    root = save(tmp_path, (30,), tensor=1, pipeline=1, use_layer_wise_distributed_optimizer=True)
    rank = root / "iter_0000030" / "mp_rank_00"
    (rank / "distrib_optim.pt").unlink()
    with megatron_enums():
        tree = torch.load(rank / "model_optim_rng.pt", weights_only=False)
        groups = tree.pop("optimizer")["optimizer"]["param_groups"]
        torch.save(tree, rank / "model_optim_rng.pt")
    for data in range(2):
        moments = {key: torch.full((4, 4), 0.1) for key in ("exp_avg", "exp_avg_sq")}
        moments = {key: (tensor * 255).to(dtype) for key, tensor in moments.items()}
        inner = {"state": {data: moments}, "param_groups": groups}
        torch.save({"optimizer": inner}, rank / f"layer_wise_optimizer_{data}.pt")
    before = snapshot(root)
    assert Run.open(root).complete(30)
    operate(root, {"set": {"lr": 3e-5}, "reset": ["moments"]})
    for data in range(2):
        state = torch.load(rank / f"layer_wise_optimizer_{data}.pt", weights_only=True)["optimizer"]
        assert {group["max_lr"] for group in state["param_groups"]} == {3e-5}
        assert not any(tensor.any() for tensor in state["state"][data].values())
    take_back(root, before)
    name = "layer_wise_optimizer_1.pt"
    scaled = torch.load(rank / name, weights_only=True)
    scaled["optimizer"]["state"][1]["exp_avg_amax"] = torch.ones(1)
    torch.save(scaled, rank / name)
    with pytest.raises(SurgeryError, match=r"no known optimizer keeps exp_avg_amax \(of 1\)"):
        surgery.plan(Run.open(root), from_data({"reset": ["moments"]}))
    (rank / name).unlink()
    missing = look.verify(Run.open(root)).findings
    assert any("mp_rank_00/layer_wise_optimizer_1.pt" in text for text in missing)
