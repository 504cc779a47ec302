"""No restart goes back to a step that a surgery has given a lower number."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ckptsurgeon import Run, plan, surgery
from ckptsurgeon.errors import SurgeryError
from ckptsurgeon.recipe.file import from_data
from tests.support.snapshot import snapshot
from tests.support.tiny_run import GROUP, make_run, write_torch_file


@pytest.mark.parametrize("data", [{"set": {"iteration": 3}}, {"set": {"batch_size": 16}}])
def test_the_trainer_resumes_the_highest_name(tmp_path: Path, data: dict[str, object]) -> None:
    root = make_run(tmp_path / "run", (8,))
    state = root / "checkpoint-8/trainer_state.json"
    state.write_text(json.dumps({"global_step": 8, "max_steps": 80, "train_batch_size": 8}))
    before = snapshot(root)
    with pytest.raises(SurgeryError) as refused:
        plan(Run.open(root), from_data(data))
    assert "each restart would come back here" in refused.value.what
    assert snapshot(root) == before
    _, old, new = shlex.split(refused.value.next[0].split("    ")[0])
    Path(old).rename(new)
    surgery.apply(Run.open(root), plan(Run.open(root), from_data(data)))
    (step,) = Run.open(root).steps()
    assert Path(new).name == f"checkpoint-{step}"
    assert json.loads((Path(new) / state.name).read_text())["global_step"] == step
    assert Run.open(root).state(step).promise.step == step + 1


def test_a_higher_number_shadows_nothing(tmp_path: Path) -> None:
    run = Run.open(make_run(tmp_path / "run", (4, 8)))
    assert plan(run, from_data({"set": {"iteration": 12}})).changes


def test_what_a_rollback_replaces_is_not_said_to_be_overwritten(tmp_path: Path) -> None:
    """Step 8 is left in the copy alone, which becomes one of step 4; the undo brings it back."""
    root = tmp_path / "run"
    root.mkdir()
    page = "name: own\nnumber: [iter_num]\nlast: [last.pt]\n"
    page += 'files:\n  "at-*.pt": {optimizers: [[optimizer]], fields: {iteration: [[iter_num]]}}\n'
    (root / "own.yaml").write_text(page)
    (root / "ckptsurgeon.yaml").write_text("format: own.yaml")
    for name, step in (("at-4.pt", 4), ("last.pt", 8)):
        adam = {"state": {0: {"step": float(step)}}, "param_groups": [{**GROUP, "params": [0]}]}
        write_torch_file(root / name, {"iter_num": step, "optimizer": adam})
    before = snapshot(root)
    run = Run.open(root)
    assert run.steps() == [4, 8]
    made = plan(run, from_data({"rollback": {"to": 4}}))
    assert "overwrite" not in " ".join(made.warnings)
    surgery.apply(run, made)
    assert run.steps() == [4]
    surgery.apply(run, surgery.plan_undo(run))
    assert snapshot(root) == before
