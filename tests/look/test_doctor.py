"""`doctor` finds what makes a run diverge although every file of it is sound."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.launch.relaunch import command, relaunch
from ckptsurgeon.look.doctor import diagnose, lost_step
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained


def test_the_updates_after_a_lost_step_are_those_that_dettmers_reported() -> None:
    """DeepSpeed before 0.5.10 lost Adam's step on each resume: 2.2 to 1.15 times too large."""
    assert [round(factor, 3) for factor in lost_step(0.9, 0.95, 5)] == [
        2.236, 1.643, 1.394, 1.252, 1.161,
    ]  # fmt: skip


def test_the_factors_are_those_of_the_real_adam() -> None:
    """A constant gradient: with full moments each update is lr, with a lost step it is more."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.95), eps=1e-12)
    weight.grad = torch.ones(1, dtype=torch.float64)
    for _ in range(2000):
        adam.step()
    adam.state[weight]["step"].zero_()
    for factor in lost_step(0.9, 0.95, 5):
        before = weight.item()
        adam.step()
        assert before - weight.item() == pytest.approx(factor, rel=1e-9)


def findings(root: Path) -> list[str]:
    return [item.what for item in diagnose(Run.open(root))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trained_run_is_healthy_and_one_that_lost_its_step_is_not(
    trained: Trained, ranks: int
) -> None:
    root = trained(ranks=ranks)
    assert findings(root) == []
    for path in (root / "global_step8").glob("*optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"].zero_()
        torch.save(tree, path)
    (told,) = findings(root)
    assert told == (
        "Adam's step is 0 and its moments are not: the next updates are "
        "2.236, 1.643, 1.394, 1.252, 1.161 times too large"
    )
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"reset": ["moments"]})))
    assert findings(root) == []


def test_iterations_that_a_surgery_skipped_are_no_lost_updates(trained: Trained) -> None:
    """Nor do they damage a step, held against the one before it."""
    root = trained()
    surgery.apply(Run.open(root), plan(Run.open(root), from_data({"skip": ["10-12"]})))
    argv = command(Run.open(root), None, ["train_iters=14"])
    promise = look.inspect(Run.open(root)).promise
    assert relaunch(Run.open(root), promise, argv, check=False, out=io.StringIO()) == 0
    run = Run.open(root)
    assert run.checkpoint(14).state().promise.adam_step == 11
    assert findings(root) == []
    assert look.verify(run, 14, level=4, against=8).findings == ()


def test_a_graft_is_known_to_have_set_the_step(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"graft": {"step": 2}})))
    assert findings(root) == []


def test_newer_steps_and_stale_pointers_are_told(trained: Trained) -> None:
    root = trained()
    (root / "latest").write_text("global_step4")
    (root / "latest_checkpointed_iteration.txt").write_text("4")
    (root / "latest_universal").write_text("global_step2_universal")
    told = findings(root)
    assert told[0].startswith("steps newer than 4 are saved, up to 8")
    assert told[1].startswith("latest_universal names a converted checkpoint")
    (root / "latest").write_text("global_step5")
    remedies = [item.next for item in diagnose(Run.open(root))]
    assert str(remedies[0]) == "ckptsurgeon repair-latest"


def test_what_a_cut_shard_took_with_it_breaks_no_promise(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"set": {"lr": 5e-4}})))
    (shard,) = (root / "global_step8").glob("*optim_states.pt")
    shard.write_bytes(shard.read_bytes()[:1000])
    (told,) = findings(root)
    assert "the file is cut short" in told
