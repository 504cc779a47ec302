"""`doctor` finds what makes a run diverge although every file of it is sound."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsurgeon import Run, look, plan, surgery
from ckptsurgeon.launch.relaunch import command, relaunch
from ckptsurgeon.look.doctor import diagnose, lost_step
from ckptsurgeon.look.finding import Finding
from ckptsurgeon.recipe.file import from_data
from tests.conftest import Trained
from tests.support.event_logs import write_log
from tests.support.tiny_run import make_run


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


@pytest.mark.long
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


# --- the logs and the next rate ------------------------------------------------------------------


def logged(root: Path, steps: Sequence[int], saved: Sequence[int]) -> list[Finding]:
    """What is found in a run that logged these steps and saved those; its trainer has ended."""
    make_run(root, saved)
    (root / "runs").mkdir()
    made = write_log(root / "unfinished", [2.0] * len(steps), at=steps)
    os.utime(made, (1.7e9, 1.7e9))
    made.rename(root / "runs" / "events.out.tfevents.1.elsewhere.1.0")
    return diagnose(Run.open(root))


@settings(max_examples=15, deadline=None)
@given(each=st.integers(1, 50), points=st.integers(20, 100), after=st.integers(0, 49))
def test_a_step_saved_between_two_logs_is_healthy(each: int, points: int, after: int) -> None:
    """Also where the last ten events were lost with a killed job, as they are in memory."""
    steps = range(each, each * points + 1, each)
    with TemporaryDirectory() as root:
        saved = (each * 2, steps[-1] + after % each)
        assert logged(Path(root) / "run", steps, saved) == []
    lost = steps[: -min(10 // each, len(steps) - 2) or None]
    with TemporaryDirectory() as root:
        assert logged(Path(root) / "run", lost, (each * 2, steps[-1])) == []


@settings(max_examples=10, deadline=None)
@given(each=st.integers(1, 20), points=st.integers(20, 100))
def test_logs_that_end_before_the_newest_step_are_found(each: int, points: int) -> None:
    steps = range(each, each * points + 1, each)
    newest = steps[-1] + max(11, points // 3 * each)
    with TemporaryDirectory() as root:
        (found,) = logged(Path(root) / "run", steps, (steps[5], newest))
    what = f"the logs end at step {steps[-1]}, before the checkpoint of step {newest}"
    assert found.what == what and "`tensorboard:` of ckptsurgeon.yaml" in str(found.next)


def test_logs_that_count_something_else_are_not_held_to_the_steps(tmp_path: Path) -> None:
    """Epochs, say: no step is saved in what was logged."""
    assert logged(tmp_path / "run", range(1, 30), (1000, 2000)) == []


def test_what_cut_the_logs_can_be_undone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert logged(root, range(1, 401), (100, 400)) == []
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"tensorboard": {"after": 300}})))
    (found,) = diagnose(Run.open(root))
    assert found.what == "the logs end at step 300, before the checkpoint of step 400"
    assert str(found.next) == "ckptsurgeon undo 0001"


def test_a_next_rate_of_0_is_found(trained: Trained) -> None:
    """Where a surgery made it so its undo is next, else where it is kept."""
    root = trained()
    run = Run.open(root)
    surgery.apply(run, plan(run, from_data({"set": {"position": 0}})))
    what = "the learning rate of step 9 is 0: that update changes nothing"
    (found,) = diagnose(Run.open(root))
    assert (found.what, str(found.next)) == (what, "ckptsurgeon undo 0001")
    shutil.rmtree(root / ".ckptsurgeon")
    (found,) = diagnose(Run.open(root))
    assert (found.what, str(found.next)) == (what, "ckptsurgeon show")


def test_a_rate_of_0_before_the_first_update_is_that_of_a_warm_up(trained: Trained) -> None:
    """As where a loss scale was too high from the start: the updates were skipped."""
    root = trained()
    run = Run.open(root)
    recipe = {"set": {"position": 0}, "reset": ["moments"]}
    surgery.apply(run, plan(run, from_data(recipe)))
    shutil.rmtree(root / ".ckptsurgeon")
    assert not any("learning rate" in found.what for found in diagnose(Run.open(root)))


def test_a_decay_that_ended_at_0_is_the_end_of_a_run(trained: Trained) -> None:
    root = trained()
    run = Run.open(root)
    state = run.state(8)
    assert state.schedule is not None
    at = int(state.schedule["num_steps"])
    shorter = {"decay": at, "decay_style": "linear", "min_lr": 0.0, "warmup": 1}
    surgery.apply(run, plan(run, from_data({"set": shorter})))
    shutil.rmtree(root / ".ckptsurgeon")  # as if its trainer had been started so
    run = Run.open(root)
    assert run.state(8).promise.lr == 0 and diagnose(run) == []
