"""Lightning with DeepSpeed: its own Trainer saves folders on two ranks, and resumes from edits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.launch import by_step
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]
PEAK = 1e-3
STEP = "epoch=0-step={}.ckpt"
KINDS = {
    "ZeRO-1, bf16": ("--stage=1", "--precision=bf16-mixed"),
    "ZeRO-2, fp32": ("--stage=2", "--clip=0.5"),
    "ZeRO-2, fp16": ("--stage=2", "--precision=16-mixed"),
    "ZeRO-3, fp32": ("--stage=3",),
    "config": ("--stage=2", "--optimizer=config"),
}
BY_KIND = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "config"])
VALUES = {"lr": 5e-4, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.3}
Make = Callable[[str], Path]


def train(root: Path, stop: int, resume: str = "", *options: object) -> dict[int, Any]:
    """Two ranks to step `stop`: what each update used."""
    words = (root, stop, resume, *options)
    environment = {"TORCHELASTIC_RUN_ID": "1"}
    return by_step("tests.support.lightning_deepspeed", *words, ranks=2, environment=environment)


def cosine(peak: float, step: int) -> float:
    return 1e-5 + (peak - 1e-5) * (1 + math.cos(math.pi * step / 40)) / 2


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Of each kind a run of six steps, and what its updates used."""

    @cache
    def make(kind: str) -> tuple[Path, Any]:
        root = tmp_path_factory.mktemp("lightning") / "run"
        return root, train(root, 6, "", *KINDS[kind])

    return make


@pytest.fixture
def copied(original: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> Make:
    return lambda kind: shutil.copytree(original(kind)[0], tmp_path / "run") / "checkpoints"


@BY_KIND
def test_a_resume_uses_all_that_was_set(copied: Make, tmp_path: Path, kind: str) -> None:
    folder = copied(kind)
    before = snapshot(folder)
    run = Run.open(folder)
    assert (run.format.name, run.steps(), run.latest()) == ("lightning-deepspeed", [2, 4, 6], 6)
    assert look.verify(run, level=4).findings == ()
    plan = operate(folder, {"rollback": {"to": 4}, "set": VALUES})
    promise = plan.promise
    assert promise is not None and promise.step == 5
    used = train(shutil.copytree(folder.parent, tmp_path / "twin"), 6, "last", *KINDS[kind])
    assert sorted(used) == [5, 6]
    for step, update in used.items():
        assert update["lr"] == pytest.approx([cosine(5e-4, step - 1)] * 2, rel=1e-9)
        assert update["betas"] == [[0.9, 0.97]] * 2 and update["eps"] == [1e-6] * 2
        assert update["weight_decay"] == [0.3, 0.0]
        assert update["steps"] == [step - 1]
        assert update["moments"]["exp_avg"] > 0
    assert used[5]["lr"][0] == pytest.approx(promise.lr, rel=1e-12)
    assert promise.adam_step == 4
    take_back(folder, before)


@BY_KIND
def test_a_rollback_alone_is_followed_by_the_same_updates(
    copied: Make, original: Callable[[str], tuple[Path, Any]], kind: str
) -> None:
    folder, first = copied(kind), original(kind)[1]
    operate(folder, {"rollback": {"to": 4}})
    assert train(folder.parent, 6, "last", *KINDS[kind]) == {step: first[step] for step in (5, 6)}


@BY_KIND
def test_moments_that_are_reset_are_zero_at_the_next_update(copied: Make, kind: str) -> None:
    folder = copied(kind)
    plan = operate(folder, {"reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    used = train(folder.parent, 7, "last", *KINDS[kind])[7]
    assert used["steps"] == [0] and used["moments"] == {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def test_a_loss_scale_is_taken(copied: Make) -> None:
    folder = copied("ZeRO-2, fp16")
    operate(folder, {"set": {"loss_scale": 64}})
    assert train(folder.parent, 7, "last", *KINDS["ZeRO-2, fp16"])[7]["loss_scale"] == 64


def test_the_clipping_of_a_checkpoint_wins_over_the_trainer(copied: Make) -> None:
    """As DeepSpeed's ZeRO 1 and 2 keep it; nothing of Lightning tells."""
    folder = copied("ZeRO-2, fp32")
    operate(folder, {"set": {"clip_grad": 0.25}})
    assert train(folder.parent, 7, "last", "--stage=2", "--clip=2")[7]["clip_grad"] == 0.25


def test_clipping_that_no_checkpoint_keeps_is_the_trainers(copied: Make) -> None:
    folder = copied("ZeRO-3, fp32")
    with pytest.raises(SurgeryError) as refused:
        surgery.plan(Run.open(folder), from_data({"set": {"clip_grad": 0.25}}))
    assert "Trainer(gradient_clip_val=0.25)" in refused.value.next[0]
    assert train(folder.parent, 7, "last", "--stage=3", "--clip=0.25")[7]["clip_grad"] == 0.25


def test_a_schedule_of_the_config_needs_the_config(copied: Make) -> None:
    folder, how = copied("config"), KINDS["config"]
    plan = operate(folder, {"rollback": {"to": 4}, "set": {"lr": 5e-4}})
    assert plan.promise is not None
    used = train(folder.parent, 6, "last", *how, "--lr=5e-4")
    assert used[5]["lr"] == [pytest.approx(plan.promise.lr, rel=1e-12)]
    assert used[6]["lr"] == [pytest.approx(plan.promise.lr, rel=0.1)]


def test_another_optimizer_is_taken_as_it_is_said(copied: Make) -> None:
    folder = copied("ZeRO-2, fp32")
    with pytest.raises(SurgeryError) as refused:
        surgery.plan(Run.open(folder), from_data({"swap_optimizer": {"to": "sgdw"}}))
    assert "convert_zero_checkpoint_to_fp32_state_dict" in refused.value.next[0]
    weights = folder / STEP.format(6)
    used = train(folder.parent, 1, "", "--stage=2", "--optimizer=sgd", "--weights", weights)
    assert used[1]["loss"] < 0.9 * train(folder.parent / "fresh", 1)[1]["loss"]


def test_its_event_files_are_compared_with_the_promise(copied: Make, tmp_path: Path) -> None:
    how = KINDS["ZeRO-2, fp32"]
    folder = copied("ZeRO-2, fp32")
    train(
        shutil.copytree(folder.parent, tmp_path / "twin"),
        8,
        "last",
        *how,
        "--log",
        tmp_path / "old",
    )
    operate(folder, {"rollback": {"to": 4}, "set": {"lr": 5e-4}})
    train(folder.parent, 8, "last", *how, "--log", tmp_path / "new")
    said = [
        CliRunner().invoke(app, ["verify", "--tb", str(tmp_path / logs), "-C", str(folder)])
        for logs in ("new", "old")
    ]
    assert [each.exit_code for each in said] == [0, 4], said[0].output + said[1].output


def test_a_step_is_as_good_as_its_run(copied: Make) -> None:
    """Each has a `latest` of the engine's own, which names no step."""
    folder = copied("ZeRO-2, fp32")
    said = [
        CliRunner().invoke(app, ["status", "-C", str(place)]).output
        for place in (folder / STEP.format(4), folder)
    ]
    assert said[0] == said[1]
