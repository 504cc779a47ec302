"""Runs of detectron2's trainer, and of loops of one's own with its parts, by a page each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ckptsurgeon import Run, look, plan, plan_undo, surgery
from ckptsurgeon.cli import app
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.look import advise
from ckptsurgeon.look.logged import own
from ckptsurgeon.recipe.file import from_data
from tests.support.detectron2_loop import END, Loop, run
from tests.support.snapshot import snapshot

PAGES = {"detectron2": False, "detectron2-plain": True}
STEPS = (2, 5, 8, 11, 14, 17)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(PAGES)),
    until=st.integers(3, END),
    back=st.integers(0, 5),
    share=st.sampled_from([0.5, 0.1, 2.0]),
)
def test_the_loop_uses_what_was_promised_and_the_undo_is_exact(
    tmp_path: Path, name: str, until: int, back: int, share: float
) -> None:
    root = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    used = Loop(root, PAGES[name]).train(until)
    saved = [step for step in STEPS if step < until]
    to = saved[back % len(saved)]
    before = snapshot(root)
    opened = Run.open(root)
    assert opened.format.name == name
    wanted = {"rollback": {"to": to}, "set": {"lr": f"{share}x"}}
    made = plan(opened, from_data(wanted))
    surgery.apply(opened, made)
    rows = (root / "metrics.json").read_text().splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == list(range(to + 1))
    after = snapshot(root)
    again = Loop(root, PAGES[name]).resume()
    assert again.begin == to + 1
    first, *rest = again.train(until) or [[]]
    if to + 1 < until:
        assert made.promise is not None and made.promise.lr == pytest.approx(max(first))
        expected = [[rate * share for rate in rates] for rates in used[to + 1 :]]
        assert [first, *rest] == [pytest.approx(rates) for rates in expected]
    if snapshot(root) == after:
        surgery.apply(Run.open(root), plan_undo(Run.open(root)))
        assert snapshot(root) == before


@pytest.mark.parametrize("name", PAGES)
def test_a_finished_run_is_sound_and_its_final_file_goes_with_its_step(
    tmp_path: Path, name: str
) -> None:
    """`last_checkpoint` names `model_final.pth`, which is of the step of the newest file."""
    Loop(tmp_path, PAGES[name]).train(END)
    assert look.verify(Run.open(tmp_path)).findings == ()
    opened = Run.open(tmp_path)
    surgery.apply(opened, plan(opened, from_data({"rollback": {"to": 11}})))
    assert not (tmp_path / "model_final.pth").exists()
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000011.pth"
    assert Loop(tmp_path, PAGES[name]).resume().begin == 12


def test_rates_that_one_factor_does_not_give_are_refused(tmp_path: Path) -> None:
    """Then the two saved keys are those of another scheduler."""
    run(tmp_path, plain=True)
    path = tmp_path / "model_0000011.pth"
    state = torch.load(path)
    state["optimizer"]["param_groups"][0]["lr"] *= 1.5
    torch.save(state, path)
    with pytest.raises(SurgeryError, match="LRMultiplier at step 12 gives"):
        plan(Run.open(tmp_path), from_data({"set": {"lr": 1e-3}}))


def test_its_total_loss_is_the_loss(tmp_path: Path) -> None:
    run(tmp_path)
    judged = advise.judge(own(Run.open(tmp_path), {}))
    assert judged.verdict == "unknown"  # too few of them
    assert not any("no loss is known" in note for note in judged.curves.notes)


@pytest.mark.parametrize("wrong", [False, True])
def test_its_lines_of_json_are_compared_with_the_promise(tmp_path: Path, wrong: bool) -> None:
    root = run(tmp_path / "run")
    assert call("set-lr", "0.5x", "-y", "-C", root).exit_code == 0
    loop = Loop(root).resume()
    if wrong:
        for group in loop.optimizer.param_groups:
            group["lr"] *= 2
    (root / "metrics.json").unlink()
    loop.train(14)
    told = call("verify", "--log", root / "metrics.json", "-C", root)
    assert told.exit_code == (4 if wrong else 0)
    assert ("verified: the trainer matches the promise of step 12" in told.stdout) is not wrong
