"""What a run says does not depend on what its folder is called."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsurgeon import Run
from tests.formats.matrix import FORMATS

NAMES = ("zero", "global_step3", "checkpoint-3", "iter_0000003", "step-3", "latest")
"""What folders of steps, and inside them, are called somewhere."""


def said(root: Path) -> dict[str, Any]:
    run = Run.open(root)
    checkpoint = run.checkpoint(run.latest())
    fields = ("lr", "betas", "adam_step", "exp_avg", "exp_avg_sq", "iteration")
    return {
        "format": run.format.name,
        "steps": run.steps(),
        "promise": checkpoint.state().promise,
        "places": {name: len(checkpoint.locate(name)) for name in fields},
    }


@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
@pytest.mark.parametrize("name", FORMATS)
def test_a_run_says_the_same_under_any_name(
    run_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    root = tmp_path / "run"
    shutil.copytree(run_of(name), root, symlinks=True)
    known = said(root)
    for other in NAMES:
        root = root.rename(tmp_path / other)
        assert said(root) == known, other
