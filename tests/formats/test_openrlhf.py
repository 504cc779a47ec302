"""OpenRLHF: what its clean-up makes of a run after a surgery, by its own function."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.plans.plan import Plan
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support import library_source
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

FILE = "openrlhf/utils/deepspeed/deepspeed.py"
NOTE = "OpenRLHF takes .ckptsurgeon for a checkpoint"


def scored(root: Path, *steps: int) -> Path:
    """With what its saver leaves in each checkpoint."""
    for step in steps:
        saved = {"metric_key": "eval_reward", "metric_value": 0.5 + step}
        (root / f"global_step{step}" / "metric.json").write_text(json.dumps(saved))
    return root


def test_a_plan_says_what_the_clean_up_takes_along(trained: Trained) -> None:
    root = trained()
    steps = Run.open(root).steps()
    recipe = from_data({"set": {"eps": 1e-7}})
    assert not any(NOTE in text for text in surgery.plan(Run.open(root), recipe).warnings)
    scored(root, *steps)
    (note,) = (text for text in surgery.plan(Run.open(root), recipe).warnings if NOTE in text)
    assert "--ckpt.max_num 1000" in note
    (root / f"global_step{steps[-1]}" / "metric.json").write_text("[1, 2")
    assert not any(NOTE in text for text in surgery.plan(Run.open(root), recipe).warnings)


def exported(folder: Path, *steps: int) -> None:
    """What --ckpt.save_hf leaves of each."""
    for step in steps:
        (folder / f"global_step{step}_hf").mkdir(parents=True)
        (folder / f"global_step{step}_hf" / "model.safetensors").write_bytes(b"weights")


def test_a_save_of_the_best_evaluation_leaves_with_its_step(trained: Trained) -> None:
    """Else the clean-up would rank it, by a metric of the branch that is abandoned."""
    root = scored(trained(), 2, 4, 6, 8)
    for step in (2, 5, 6):
        shutil.copytree(root / "global_step4", root / f"best_global_step{step}")
    exported(root, 6)
    assert Run.open(root).steps() == [2, 4, 6, 8]
    before = snapshot(root)
    operate(root, {"rollback": {"to": 4}})
    assert {path.name for path in root.glob("best_*")} == {"best_global_step2"}
    take_back(root, before)


def test_a_repair_names_a_newer_save_of_the_best_evaluation(trained: Trained) -> None:
    """It is what `latest` names after it was saved, and loads as any step does; an export does
    not."""
    root = scored(trained(), 2, 4, 6, 8)
    shutil.copytree(root / "global_step8", root / "best_global_step9")
    exported(root, 11)
    (root / "latest").write_text("best_global_step9")
    with pytest.raises(SurgeryError, match="latest is missing or names no step"):
        Run.open(root).latest()
    (note,) = (text for text in repair(root).warnings if "is newer" in text)
    best, step = root / "best_global_step9", root / "global_step9"
    assert note.startswith("best_global_step9 is newer, and no step by its name: mv ")
    assert f"mv {best} {step} makes it one" in note
    assert not any("is newer" in text for text in repair(root, to=8).warnings)
    best.rename(step)
    plan = repair(root)
    assert plan.step == 9 and not any("is newer" in text for text in plan.warnings)


def repair(root: Path, **to: int) -> Plan:
    return surgery.plan(Run.open(root), from_data({"repair_latest": to}))


def test_an_export_leaves_with_its_step(trained: Trained) -> None:
    """Also one whose step a clean-up has removed since; those of steps that stay, stay."""
    root = scored(trained(), 4, 8)
    exported(root, 2, 4, 8, 9)
    assert Run.open(root).steps() == [2, 4, 6, 8]
    before = snapshot(root)
    operate(root, {"rollback": {"to": 4}})
    assert {path.name for path in root.glob("*_hf")} == {"global_step2_hf", "global_step4_hf"}
    exported(root, 6)
    shutil.copytree(root / "global_step4", root / "global_step6")
    take_back(root, before)


def test_a_rollback_of_an_actor_names_what_stays_beside_it(trained: Trained) -> None:
    root = trained()
    root = root.rename(root.with_name("_actor"))
    exported(root.parent, 4, 6, 8)
    (root.parent / "_critic").mkdir()
    plan = surgery.plan(Run.open(root), from_data({"rollback": {"to": 4}}))
    said = "\n".join(plan.warnings)
    assert f"{root.parent / '_critic'} has steps and a latest of its own" in said
    assert f"stay in {root.parent}: global_step6_hf, global_step8_hf" in said


@pytest.mark.formats
@pytest.mark.skipif(
    not (library_source.FOLDER / FILE).is_file(), reason="make test-formats installs OpenRLHF"
)
@pytest.mark.parametrize("most", [3, 1000])
def test_it_removes_the_attic_unless_it_may_keep_all(trained: Trained, most: int) -> None:
    root = trained()
    scored(root, *Run.open(root).steps())
    before = snapshot(root)
    operate(root, {"set": {"eps": 1e-7}})
    for step in (101, 102, 103):
        saved(root, step, most)
    kept = (root / ".ckptsurgeon").is_dir()
    assert kept is (most == 1000)
    if kept:
        for step in (101, 102, 103):
            shutil.rmtree(root / f"global_step{step}")
        take_back(root, before)


def saved(root: Path, step: int, most: int) -> None:
    """What `save_ckpt` removes before it saves; the engine's own save is a folder here."""
    names = ["save_ckpt", "_read_ckpt_metric", "_get_ckpt_metric_path", "_write_ckpt_metric"]
    wanted = ["CKPT_METRIC_FILENAME", *names]

    class Engine:
        def save_checkpoint(self, save_dir: str, tag: str, **_: Any) -> None:
            (Path(save_dir) / tag).mkdir()

    library = library_source.taken(
        FILE, [f"DeepspeedStrategy.{name}" for name in wanted], os=os, json=json, gc=gc,
        shutil=shutil, deepspeed=SimpleNamespace(DeepSpeedEngine=Engine), torch=torch,
        torch_dist_barrier_and_cuda_sync=lambda: None,
    )  # fmt: skip
    methods = {name: getattr(library, name) for name in wanted}
    strategy = type("Strategy", (), {**methods, "print": lambda *_: None, "is_rank_0": bool})()
    strategy.is_rank_0 = lambda: True
    strategy.save_ckpt(Engine(), str(root), f"global_step{step}", most, float("inf"), {})
