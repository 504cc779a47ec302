"""After a rollback the trainer's own picker takes the step that was meant, and its own clean-up
removes nothing of the new branch: each with the functions of the library itself."""

from __future__ import annotations

import json
import os
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptsurgeon import surgery
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.run.run import Run
from tests.formats.matrix import hugging_face
from tests.support.dcp_trainers import torchtitan
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own making
]


# --- torchtitan ----------------------------------------------------------------------------------


class Titan:
    """torchtitan's CheckpointManager on a folder, without a trainer around it."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        from torchtitan.components.checkpointer.dcp import CheckpointManager

        self.manager = CheckpointManager.__new__(CheckpointManager)
        vars(self.manager).update(
            folder=str(folder), keep_latest_k=keep, purge_queue=queue.Queue(),
            purge_thread=SimpleNamespace(is_alive=lambda: False), _should_purge=lambda: keep > 0,
            enable=False, stager=None,
        )  # fmt: skip

    def resumes(self) -> int:
        return int(self.manager._find_load_step())

    def purged(self) -> list[str]:
        """The names that a save would remove."""
        self.manager._purge_stale_checkpoints()
        names = []
        while not self.manager.purge_queue.empty():
            names.append(Path(self.manager.purge_queue.get()).name)
        return names


@pytest.mark.witness(
    "torchtitan (DCP)",
    "rollback",
    by="torchtitan",
    how="C",
)
def test_torchtitan_resumes_the_step_and_purges_none_of_the_new_branch(tmp_path: Path) -> None:
    root = torchtitan(tmp_path / "run")
    shutil.copytree(root / "step-6", root / "old-step-9")  # taken for step 9
    (root / "step-8").mkdir()  # half published: an async save that died
    (root / "step-8" / ".metadata.tmp").write_bytes(b"")
    before = snapshot(root)
    assert Titan(root).resumes() == 9
    operate(root, {"rollback": {"to": 2}})
    assert Titan(root).resumes() == Run.open(root).latest() == 2
    assert sorted(path.name for path in root.glob("*step*")) == ["step-2"]
    for step in (4, 6):  # the new branch
        shutil.copytree(root / "step-2", root / f"step-{step}")
    assert Titan(root, keep=2).purged() == ["step-2"]
    for step in (4, 6):
        shutil.rmtree(root / f"step-{step}")
    take_back(root, before)


def test_without_the_rollback_torchtitan_would_purge_the_new_branch(tmp_path: Path) -> None:
    """What the attic is for: with the later folders in the way, the step that was gone back to is
    the first to be removed."""
    root = torchtitan(tmp_path / "run")
    assert Titan(root, keep=2).purged() == ["step-2"]
    assert Titan(root).resumes() == 6


# --- Hugging Face --------------------------------------------------------------------------------


def test_the_trainer_resumes_the_step_and_rotates_none_of_the_new_branch(tmp_path: Path) -> None:
    from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

    root = tmp_path / "run"
    hugging_face(root)
    shutil.copytree(root / "checkpoint-4", root / "checkpoint-8.bak")  # counted, never resumed
    operate(root, {"rollback": {"to": 2}})
    assert get_last_checkpoint(str(root)) == str(root / "checkpoint-2")
    shutil.copytree(root / "checkpoint-2", root / "checkpoint-3")  # the new branch
    rotate_checkpoints(str(root), save_total_limit=1)
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-3"]


def test_the_times_of_folders_stay(tmp_path: Path) -> None:
    """The Trainer rotates by the times of the folders, so neither a surgery nor its undo makes an
    older step the newest."""
    from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints

    root = tmp_path / "run"
    hugging_face(root)
    folders = [root / "checkpoint-2", root / "checkpoint-4"]
    for age, folder in enumerate(folders):
        os.utime(folder, (1e9 + age * 100, 1e9 + age * 100))
    operate(root, {"rollback": {"to": 2}, "set": {"iteration": 3, "eps": 1e-6}})
    assert folders[0].stat().st_mtime == 1e9
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert sort_checkpoints(str(root), use_mtime=True) == [str(folder) for folder in folders]
    shutil.copytree(folders[1], root / "checkpoint-6")
    os.utime(root / "checkpoint-6")
    rotate_checkpoints(str(root), save_total_limit=2, use_mtime=True)
    names = sorted(path.name for path in root.glob("checkpoint-*"))
    assert names == ["checkpoint-4", "checkpoint-6"]


def test_a_folder_that_only_begins_like_a_step_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "run"
    hugging_face(root)
    shutil.copytree(root / "checkpoint-4", root / "checkpoint-8.bak")
    before = snapshot(root)
    operate(root, {"rollback": {"to": 2}})
    assert not (root / "checkpoint-8.bak").exists()
    take_back(root, before)


def test_a_best_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    root = tmp_path / "run"
    hugging_face(root)
    state = root / "checkpoint-4" / "trainer_state.json"
    for best, told in (("checkpoint-4", False), ("checkpoint-2", False), ("checkpoint-3", True)):
        document = json.dumps({"global_step": 4, "best_model_checkpoint": f"out/{best}"})
        state.write_text(document)
        plan = surgery.plan(
            Run.open(root), from_data({"rollback": {"to": 4}, "set": {"eps": 1e-6}})
        )
        assert any("best model so far" in line for line in plan.warnings) == told


def test_a_best_model_that_left_ranks_nothing_any_more(tmp_path: Path) -> None:
    """With the Trainer's own comparison: step 2 had been the best, and its folder went when 4 was
    better. Back at 3, the next metric is the best so far, although 2 had a better one."""
    from transformers import TrainerState, TrainingArguments
    from transformers.trainer import Trainer

    root = tmp_path / "run"
    hugging_face(root)
    (root / "checkpoint-2").rename(root / "checkpoint-3")
    file = root / "checkpoint-3" / "trainer_state.json"
    best = {"best_metric": 0.5, "best_global_step": 2, "best_model_checkpoint": "out/checkpoint-2"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "global_step": 3, **best}))

    def is_best() -> bool:
        arguments = TrainingArguments(
            str(tmp_path / "out"), metric_for_best_model="loss", greater_is_better=False,
            save_strategy="steps", use_cpu=True,
        )  # fmt: skip
        live = SimpleNamespace(args=arguments, state=TrainerState.load_from_json(str(file)))
        return bool(Trainer._determine_best_metric(live, {"eval_loss": 0.7}, trial=None))  # type: ignore[arg-type]

    before = snapshot(root)
    assert not is_best()
    plan = operate(root, {"rollback": {"to": 3}})
    assert "no longer names checkpoint-2 as the best model" in "\n".join(plan.warnings)
    assert is_best()
    assert [json.loads(file.read_text())[key] for key in best] == [None] * 3
    take_back(root, before)


# --- Accelerate ----------------------------------------------------------------------------------


@pytest.fixture
def _cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield


def automatic(project: Path, limit: int | None = None) -> tuple[Any, Any]:
    """A real Accelerator that names its checkpoints itself."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    torch.manual_seed(0)
    names = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=names)
    model = torch.nn.Linear(4, 4)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator, accelerator.prepare(model, adam)[1]


@pytest.mark.usefixtures("_cpu")
def test_accelerates_own_naming_goes_on_from_the_step(tmp_path: Path) -> None:
    project = tmp_path / "run"
    accelerator, adam = automatic(project)
    for _ in range(4):
        accelerator.backward(sum(p.pow(2).sum() for p in adam.param_groups[0]["params"]))
        adam.step()
        accelerator.save_state()
    (project / "checkpoints" / "checkpoint_7").mkdir()  # a save that died
    before = snapshot(project)
    run = Run.open(project / "checkpoints")
    assert (run.root, run.steps()) == (project, [0, 1, 2, 3])
    plan = operate(project, {"rollback": {"to": 1}, "set": {"beta2": 0.9}})
    assert "project_configuration.iteration = 2 after load_state" in "\n".join(plan.warnings)
    copy = Path(shutil.copytree(project, tmp_path / "resumed"))
    accelerator, adam = automatic(copy, limit=2)
    accelerator.load_state()  # it takes a number out of every name in checkpoints/
    assert adam.param_groups[0]["betas"] == (0.9, 0.9)
    assert next(iter(adam.optimizer.state.values()))["step"] == 2
    accelerator.project_configuration.iteration = 2
    accelerator.save_state()
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    accelerator.project_configuration.iteration = 0  # as of a launch that was not told
    for newest in ("checkpoint_0", "checkpoint_1"):
        accelerator.save_state()
        names = sorted(path.name for path in (copy / "checkpoints").iterdir())
        assert newest in names
    assert names == ["checkpoint_1", "checkpoint_2"]  # the second save removed the first
    take_back(project, before)
