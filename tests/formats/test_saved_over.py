"""A trainer that saves its optimizer over the one before: there is no older step to go back to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsurgeon import Run, surgery
from ckptsurgeon.errors import UsageError
from ckptsurgeon.recipe.file import from_data
from ckptsurgeon.surgery.fork import fork
from tests.support.epoch_runs import espnet, torchtune
from tests.support.own_runs import saved
from tests.support.snapshot import snapshot
from tests.support.surgeries import operate, take_back

OWN = """name: own
number: [updates]
files:
  "ckpt-4.pt": {optimizers: [[optimizer]]}
"""


@pytest.fixture(params=["torchtune", "espnet", "own"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param != "own":
        return {"torchtune": torchtune, "espnet": espnet}[request.param](tmp_path / "run")
    saved(tmp_path / "run", {4: 4}, OWN)
    return tmp_path / "run"


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_no_older_step_is_half_a_step(root: Path, step: int) -> None:
    """The weights of an older epoch may lie there: nobody joins them to the newest moments."""
    before = snapshot(root)
    for recipe in ({"rollback": {"to": step}}, {"rollback": {"to": step}, "reset": ["moments"]}):
        with pytest.raises(UsageError, match="saves each step over the one before, in") as refused:
            surgery.plan(Run.open(root), from_data(recipe))
        says = {
            "torchtune": "resume_from_checkpoint=False",
            "espnet": "--init_param",
            "own": "step 4 is saved",
        }
        assert says[Run.open(root).format.name] in str(refused.value.next[0])
    assert snapshot(root) == before


def test_a_later_one_is_simply_not_there(root: Path) -> None:
    with pytest.raises(UsageError, match=r"step 9 is not saved in [^:]*$"):
        surgery.plan(Run.open(root), from_data({"rollback": {"to": 9}}))


def test_the_newest_is_edited(root: Path) -> None:
    before = snapshot(root)
    plan = operate(root, {"set": {"beta1": 0.8, "beta2": 0.9}, "reset": ["moments"]})
    assert plan.promise is not None and plan.promise.adam_step == 0
    assert any("until the trainer saves over" in note for note in plan.warnings)
    take_back(root, before)


def test_a_fork_of_torchtune_says_which_weights_are_missing(tmp_path: Path) -> None:
    run = Run.open(torchtune(tmp_path / "run"))
    made = fork(run, 4, tmp_path / "branch", from_data({"reset": ["moments"]}), "copy")
    said = [note for note in made.warnings if "weights" in note]
    assert len(said) == 1 and "copy that folder into the fork" in said[0]
