"""OPT-175B's fake SGD: proof that beta1 is 0 in the live optimizer, not only in a printed line."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.launch import launch

SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def moments(root: Path, step: int) -> list[torch.Tensor]:
    state = torch.load(root / f"global_step{step}" / SHARD, weights_only=False)
    states = state["optimizer_state_dict"]["base_optimizer_state"]["state"]
    return [states[key]["exp_avg"] for key in sorted(states)]


def forget_the_first_moment(root: Path, step: int) -> None:
    path = root / f"global_step{step}" / SHARD
    state = torch.load(path, weights_only=False)
    for entry in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        entry["exp_avg"].zero_()
    torch.save(state, path)


def one_step_with_and_without_memory(root: Path, other: Path) -> tuple[list[torch.Tensor], ...]:
    """exp_avg after one more step, from the saved exp_avg and from exp_avg = 0."""
    shutil.copytree(root, other)
    forget_the_first_moment(other, 8)
    for folder in (root, other):
        launch(f"--config={folder / 'train.yaml'}", "train_iters=9")
    return moments(root, 9), moments(other, 9)


def test_with_beta1_zero_exp_avg_is_the_gradient_alone(trained: Trained, tmp_path: Path) -> None:
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"set": {"beta1": 0.0, "eps": 1.0, "lr": 9e-3}})))
    kept, forgotten = one_step_with_and_without_memory(root, tmp_path / "other")
    assert any(bool(tensor.any()) for tensor in kept)
    assert all(torch.equal(a, b) for a, b in zip(kept, forgotten, strict=True))


def test_with_the_old_betas_exp_avg_remembers(trained: Trained, tmp_path: Path) -> None:
    kept, forgotten = one_step_with_and_without_memory(trained(), tmp_path / "other")
    assert not any(torch.equal(a, b) for a, b in zip(kept, forgotten, strict=True))
