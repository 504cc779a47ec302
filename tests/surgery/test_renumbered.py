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
from tests.support.tiny_run import make_run


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
