"""A step that says in no number how many ranks saved it is not understood, and not damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsurgeon import Run, look, surgery
from ckptsurgeon.errors import NotUnderstood
from ckptsurgeon.recipe.file import from_data
from tests.formats import matrix
from tests.support.snapshot import differs, snapshot


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Makes a run of each format once, to be copied."""
    folder = tmp_path_factory.mktemp("worlds")

    def make(name: str) -> Path:
        root = folder / name / "run"
        return root if root.exists() else matrix.make(name, root)

    yield make


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [None, "auto", 0, -1, 2.0, 1 << 40])
@pytest.mark.parametrize(
    ("name", "file", "key"),
    [
        ("DeepSpeed ZeRO 1", "mp_rank_00_model_states.pt", "dp_world_size"),
        ("DeepSpeed ZeRO 1", "mp_rank_00_model_states.pt", "mp_world_size"),
        ("OLMo-core", "train/rank0.pt", "world_size"),
    ],
)
def test_a_world_that_is_no_number_is_not_understood_and_a_rollback_goes_on(
    made: Callable[[str], Path], tmp_path: Path, name: str, file: str, key: str, size: Any
) -> None:
    """Which shards its step has is not known then, so the step is not called whole."""
    root = tmp_path / "run"
    shutil.copytree(made(name), root)
    run = Run.open(root)
    first, last = run.steps()[0], run.latest()
    path = run.format.directory(root, last) / file
    saved = torch.load(path, weights_only=False)
    torch.save(saved | {key: size}, path)
    before = snapshot(root)
    run = Run.open(root)
    assert run.conditions.of(last) == "not understood" and run.conditions.of(first) == "complete"
    with pytest.raises(NotUnderstood, match=rf"{path.name}: {key} is .*, not a whole number"):
        run.state(last)
    findings = look.verify(run, step=last).findings
    assert any(path.name in each and key in each for each in findings)
    assert not any("damaged" in each for each in (*findings, run.conditions.why(last)))
    surgery.apply(run, surgery.plan(run, from_data({"rollback": {"to": first}})))
    assert Run.open(root).latest() == first and look.verify(Run.open(root)).findings == ()
    surgery.apply(Run.open(root), surgery.plan_undo(Run.open(root)))
    assert differs(snapshot(root), before, times=False) is None
