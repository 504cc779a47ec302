"""Hugging Face: the real Trainer writes, and resumes from what was edited."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import look, surgery
from ckptsurgeon.errors import SurgeryError, UsageError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.usefixtures("accelerate_on_cpu"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
PEAK = 1e-3


class Words(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The same few random sequences every time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def trainer(
    output: Path, steps: int, scheduler: str = "linear", seen: Any = None, batches: Any = None
) -> Any:
    """A real Trainer of a tiny GPT-2 with random weights; it saves every 2 of 8 steps."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            if seen is not None:
                group = live["optimizer"].param_groups[0]
                kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
                inner = live["optimizer"]
                inner = getattr(inner, "optimizer", inner)
                first = inner.state.get(group["params"][0], {})
                moment = first["exp_avg"].abs().sum().item() if first else None
                seen.append({"step": state.global_step, "moment": moment, **kept})

        def on_step_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
            if state.global_step >= steps:
                control.should_training_stop = True

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=8, save_steps=2, save_strategy="steps", warmup_steps=2,
        per_device_train_batch_size=4, learning_rate=PEAK, lr_scheduler_type=scheduler,
        report_to=[], disable_tqdm=True, use_cpu=True, weight_decay=0.1, logging_strategy="no",
    )  # fmt: skip

    class Watched(Trainer):
        def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
            if batches is not None:
                batches[self.state.global_step] = inputs["input_ids"].clone()
            return super().training_step(model, inputs, *more)

    return Watched(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Words(), callbacks=[Watch()]
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(scheduler: str) -> Path:
        if scheduler not in made:
            made[scheduler] = tmp_path_factory.mktemp("hf") / scheduler
            trainer(made[scheduler], 6, scheduler).train()
        return made[scheduler]

    return make


@pytest.fixture
def run(original: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(scheduler: str = "linear") -> Path:
        return Path(shutil.copytree(original(scheduler), tmp_path / "run"))

    return copy


def resumed(root: Path, scheduler: str = "linear") -> list[dict[str, Any]]:
    """What the live optimizer has at the beginning of each step after a resume of the newest."""
    seen: list[dict[str, Any]] = []
    trainer(root, 8, scheduler, seen).train(resume_from_checkpoint=True)
    return seen


def test_status_and_verify_of_what_the_trainer_saved(run: Callable[[str], Path]) -> None:
    opened = Run.open(run("linear"))
    assert (opened.format.name, opened.steps(), opened.latest()) == ("transformers", [2, 4, 6], 6)
    assert look.verify(opened, level=4).findings == ()
    state = look.inspect(opened)
    assert state.promise.step == 7 and state.promise.adam_step == 6
    assert state.promise.lr == pytest.approx(PEAK * 2 / 6)
    assert state.peak_lr == PEAK


@pytest.mark.witness(
    "Hugging Face",
    "set-lr",
    by="transformers",
)
@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant"])
def test_a_resume_uses_the_new_rate_at_once_and_after(
    run: Callable[[str], Path], tmp_path: Path, scheduler: str
) -> None:
    root = run(scheduler)
    before = snapshot(root)
    untouched = resumed(Path(shutil.copytree(root, tmp_path / "other")), scheduler)
    plan = operate(root, {"set": {"lr": PEAK / 2}})
    seen = resumed(Path(shutil.copytree(root, tmp_path / "resumed")), scheduler)
    assert plan.promise is not None and plan.promise.lr == seen[0]["lr"]
    assert [item["step"] for item in seen] == [6, 7]
    for new, old in zip(seen, untouched, strict=True):
        assert new["lr"] == pytest.approx(old["lr"] / 2)
    take_back(root, before)


@pytest.mark.witness(
    "Hugging Face",
    "set betas",
    "set eps",
    "set weight_decay",
    by="transformers",
)
def test_a_resume_uses_the_other_hyperparameters(run: Callable[[str], Path]) -> None:
    root = run("linear")
    values = {"beta1": 0.8, "beta2": 0.98, "eps": 1e-6, "weight_decay": 0.3}
    operate(root, {"set": values})
    seen = resumed(root)
    for item in seen:
        assert (item["betas"], item["eps"], item["weight_decay"]) == ((0.8, 0.98), 1e-6, 0.3)


@pytest.mark.witness(
    "Hugging Face",
    "reset moments",
    by="transformers",
)
def test_a_resume_begins_with_moments_of_zero(run: Callable[[str], Path]) -> None:
    root = run("linear")
    before = snapshot(root)
    operate(root, {"reset": ["moments"]})
    held = torch.load(root / "checkpoint-6" / "optimizer.pt", weights_only=True)
    assert {float(state["step"]) for state in held["state"].values()} == {0.0}
    copy = Path(shutil.copytree(root, root.parent / "resumed"))
    assert resumed(copy)[0]["moment"] == 0
    take_back(root, before)


@pytest.mark.witness(
    "Hugging Face",
    "rollback",
    by="transformers",
)
def test_a_resume_after_a_rollback_goes_on_from_there(run: Callable[[str], Path]) -> None:
    root = run("linear")
    before = snapshot(root)
    operate(root, {"rollback": {"to": 2}, "set": {"lr": 2e-3}})
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-2"]
    copy = Path(shutil.copytree(root, root.parent / "resumed"))
    seen = resumed(copy)
    assert (seen[0]["step"], seen[0]["lr"]) == (2, pytest.approx(2e-3))
    take_back(root, before)


def test_what_the_trainer_takes_from_its_arguments_is_refused(run: Callable[[str], Path]) -> None:
    opened = Run.open(run("linear"))
    for recipe, flag in (
        ({"set": {"clip_grad": 0.5}}, "--max_grad_norm 0.5"),
        ({"set": {"seed": 3}}, "--seed 3"),
        ({"skip": ["7-8"]}, "ckptsurgeon set iteration=8"),
    ):
        with pytest.raises(SurgeryError) as error:
            surgery.plan(opened, from_data(recipe))
        assert flag in " ".join(error.value.next)


@pytest.mark.witness(
    "Hugging Face",
    "set iteration",
    by="transformers",
)
def test_the_step_in_the_trainers_state_decides_the_batches_that_are_passed_over(
    run: Callable[[str], Path],
) -> None:
    root = run("linear")
    before = snapshot(root)
    batches: dict[int, Any] = {}
    trainer(root.parent / "other", 8, batches=batches).train()
    plan = operate(root, {"rollback": {"to": 4}, "set": {"iteration": 6}})
    assert plan.promise is not None and plan.promise.step == 7
    assert any("batches of 6 updates" in line for line in plan.warnings)
    state = json.loads((root / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    copy = Path(shutil.copytree(root, root.parent / "resumed"))
    resumed_batches: dict[int, Any] = {}
    trainer(copy, 8, batches=resumed_batches).train(str(copy / "checkpoint-4"))
    assert sorted(resumed_batches) == [6, 7]
    for step in (6, 7):
        assert torch.equal(resumed_batches[step], batches[step])
    take_back(root, before)


@pytest.mark.witness("Hugging Face", "set batch_size", by="transformers")
def test_the_samples_go_on_with_another_batch_size(run: Callable[[str], Path]) -> None:
    """A resume passes over `global_step` batches of the new size: the step is converted with it,
    and first its folder gets that number, or later resumes would come back to it."""
    root = run("linear")
    with pytest.raises(SurgeryError, match="each restart would come back here") as named:
        surgery.plan(Run.open(root), from_data({"set": {"batch_size": 8}}))
    line = named.value.next[0].split("    ")[0].replace("ASIDE", str(root.parent / "aside"))
    subprocess.run(line, shell=True, check=True)
    before = snapshot(root)
    batches: dict[int, Any] = {}
    rates: list[dict[str, Any]] = []
    trainer(root.parent / "other", 8, seen=rates, batches=batches).train()
    plan = operate(root, {"set": {"batch_size": 8}})
    told = " ".join(plan.warnings)
    assert "6 steps × 4 / 8 = 3" in told
    assert "--per_device_train_batch_size 8" in told
    assert "--max_steps 4 (8 × 4 / 8)" in told
    state = json.loads((root / "checkpoint-3" / "trainer_state.json").read_text())
    assert (state["train_batch_size"], state["global_step"]) == (8, 3)
    for auto in (False, True):  # the argument decides, or with it the checkpoint
        copy = Path(shutil.copytree(root, root.parent / f"resumed-{auto}"))
        mine: dict[int, Any] = {}
        seen: list[dict[str, Any]] = []
        again = trainer(copy, 4, seen=seen, batches=mine)
        again.args.max_steps, again.args.warmup_steps = 4, 1
        again.args.per_device_train_batch_size = 4 if auto else 8
        again.args.auto_find_batch_size = auto
        again._train_batch_size = again.args.train_batch_size
        again.train(str(copy / "checkpoint-3"))
        assert sorted(mine) == [3]
        assert torch.equal(mine[3], torch.cat([batches[6], batches[7]]))
        assert seen[0]["lr"] == rates[6]["lr"] == plan.promise.lr
    take_back(root, before)
    with pytest.raises(UsageError, match="6 × 4 / 5 is not a whole number") as refused:
        surgery.plan(Run.open(root), from_data({"set": {"batch_size": 5}}))
    assert "a multiple of 5" in refused.value.next[0]
    with pytest.raises(SurgeryError, match="no ramp-up"):
        surgery.plan(Run.open(root), from_data({"set": {"rampup": [4, 4, 100]}}))


@pytest.mark.parametrize("lost", ["optimizer.pt", "scheduler.pt"])
def test_a_folder_whose_optimizer_the_trainer_would_not_load_is_no_place_for_a_surgery(
    run: Callable[[str], Path], lost: str
) -> None:
    """It resumes the highest number, and takes neither file without the other, in silence."""
    root = run("linear")
    (root / "checkpoint-6" / lost).unlink()
    assert resumed(Path(shutil.copytree(root, root.parent / "as it is")))[0]["moment"] is None
    for step in (None, 6):
        with pytest.raises(SurgeryError, match="step 6 is incomplete") as error:
            look.inspect(Run.open(root), step)
        assert lost in error.value.what
    operate(root, {"rollback": {"to": 4}, "set": {"lr": PEAK / 2}})
    seen = resumed(Path(shutil.copytree(root, root.parent / "resumed")))
    assert seen[0]["step"] == 4 and seen[0]["moment"] > 0


def test_a_folder_without_anything_is_resumed_too(run: Callable[[str], Path]) -> None:
    root = run("linear")
    (root / "checkpoint-8").mkdir()
    with pytest.raises(SurgeryError, match="step 8 is incomplete"):
        Run.open(root).latest()


# --- an engine inside ----------------------------------------------------------------------------


def test_an_engine_inside_and_the_scheduler_beside_it_change_together(tmp_path: Path) -> None:
    from tests.support.deepspeed_engine import Options, make, process_group, resume

    root = tmp_path / "run"
    folder = root / "checkpoint-6"
    folder.mkdir(parents=True)
    options = Options(scheduler="LambdaLR")
    with process_group():
        make(folder, options)
    shard = folder / "global_step6" / "mp_rank_00_model_states.pt"
    torch.save(torch.load(shard, weights_only=False)["lr_scheduler"], folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 6}')
    before = snapshot(root)
    opened = Run.open(folder)  # the scheduler beside the engine is no part of a run of DeepSpeed
    assert (opened.root, opened.format.name, opened.latest()) == (root, "transformers", 6)
    assert look.verify(opened, level=4).findings == ()
    plan = operate(root, {"set": {"lr": PEAK / 2, "beta2": 0.99}})
    inside = torch.load(shard, weights_only=False)["lr_scheduler"]
    assert torch.load(folder / "scheduler.pt") == inside
    assert inside["base_lrs"][0] == pytest.approx(PEAK / 2)
    edited = Path(shutil.copytree(folder, tmp_path / "resumed"))
    with process_group():
        live = resume(edited, options)
    assert plan.promise is not None
    assert live["lr"][0] == plan.promise.lr == inside["_last_lr"][0]
    assert live["betas"][0] == [0.9, 0.99]
    take_back(root, before)
